#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cohort::base {

/// Returns the bytes of a descriptor's file from `begin` on, wherever others have read it to: at most
/// `max_bytes`, and less at its end or where it cannot be read. Then errno is 0 at the end, else it says why.
std::string read_at(int fd, std::int64_t begin, std::size_t max_bytes);

}  // namespace cohort::base
