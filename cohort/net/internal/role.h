#pragma once

#include <cstdint>

namespace cohort::net {

/// Of a connection's two sides: who connected, and connects again, and who listened.
enum class Role : std::uint8_t { kCaller, kListener };

}  // namespace cohort::net
