#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>

namespace cohort::launch {

/// How often ranks of one place have failed in a row, without a step of the run between. Reads no clock. Not
/// for users of the library.
class PlaceFailures {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// After more of them the place is hopeless: its program fails, or its node is broken.
  static constexpr int kMaxInARow = 3;

  /// A rank of this place has failed; so many steps of the run are committed. Returns how often in a row that
  /// happened.
  int note(std::size_t place, std::uint64_t steps, Time now) {
    Failures& failures = of_place_[place];
    if (steps > failures.steps) failures.count = 0;
    failures.steps = steps;
    failures.due = now + pause_after(++failures.count);
    failures.is_due = true;
    return failures.count;
  }
  /// Whether a successor may start now; true once for each failure.
  bool take_due(std::size_t place, Time now) {
    const auto found = of_place_.find(place);
    if (found == of_place_.end() || !found->second.is_due || now < found->second.due) return false;
    found->second.is_due = false;
    return true;
  }

 private:
  struct Failures {
    int count = 0;
    std::uint64_t steps = 0;
    Time due;
    bool is_due = false;
  };
  // None at first: others wait for the successor. One that fails again, before there is a next generation,
  // must not fill the host.
  static std::chrono::milliseconds pause_after(int count) {
    if (count < 2) return std::chrono::milliseconds(0);
    return std::min(std::chrono::milliseconds(500) * (1 << std::min(count - 2, 6)),
                    std::chrono::milliseconds(30'000));
  }

  std::map<std::size_t, Failures> of_place_;
};

}  // namespace cohort::launch
