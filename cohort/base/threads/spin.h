#pragma once

#include <chrono>
#include <thread>

namespace cohort::base {

/// Looks for a change until it is there or `patience` is over, and returns whether it is there. Yields
/// between looks, so that whoever makes the change can do so on this core. Without patience it looks once.
template <typename Ready>
bool spin_until(const Ready& ready, std::chrono::microseconds patience) {
  if (ready()) return true;
  if (patience.count() <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + patience;
  do {
    std::this_thread::yield();
    if (ready()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace cohort::base
