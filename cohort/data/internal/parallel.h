#pragma once

#include <cstdint>
#include <functional>

namespace cohort::data {

/// Calls `work(thread, item)` once for each item 0 .. count - 1, on `threads` threads, in no order. The first
/// exception (of the lowest item that threw) ends the rest and is thrown on. No LibTorch.
void for_each_item(std::int64_t count, int threads,
                   const std::function<void(int thread, std::int64_t item)>& work);

}  // namespace cohort::data
