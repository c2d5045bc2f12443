#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "tests/support/environment.h"

namespace cohort::test {

/// What simulators of rpc's protocols share: events by a virtual clock, in an order that a seed gives, pairs
/// of workers that have lost each other, and the first thing that does not hold.
class ProtocolSimulation {
 protected:
  explicit ProtocolSimulation(std::uint64_t seed) : random_(seed) {}

  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  void at(std::uint64_t delay, std::function<void()> run) {
    events_.push({now_ + delay, next_order_++, std::move(run)});
  }
  /// Two workers lose each other. What is on the way between them may be lost, and nothing else comes.
  /// `see(a, b)`: `a` gives `b` up, each at a time of its own. Others keep both.
  template <typename See>
  void cut(std::int32_t a, std::int32_t b, const See& see) {
    if (a == b || !cut_.insert(std::minmax(a, b)).second) return;
    for (const auto& [self, other] : {std::pair(a, b), std::pair(b, a)}) {
      at(1 + pick(pick(2) == 0 ? 5 : 500), [see, self = self, other = other] { see(self, other); });
    }
  }
  bool is_cut(std::int32_t a, std::int32_t b) const { return cut_.count(std::minmax(a, b)) > 0; }
  std::size_t num_cut() const { return cut_.size(); }
  std::uint64_t num_events() const { return next_order_; }  ///< made so far
  void fail(const std::string& what) {
    if (error_.empty()) error_ = what;
  }
  const std::string& error() const { return error_; }
  /// Runs all events, and those that they make, with `check` after each, until something does not hold.
  template <typename Check>
  void drain(const Check& check) {
    while (!events_.empty() && error_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      event.run();
      check();
    }
  }

 private:
  struct Event {
    std::uint64_t time, order;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return std::tie(time, order) > std::tie(other.time, other.order);
    }
  };

  std::mt19937_64 random_;
  std::uint64_t now_ = 0, next_order_ = 0;
  std::priority_queue<Event> events_;
  std::set<std::pair<std::int32_t, std::int32_t>> cut_;
  std::string error_;
};

/// COHORT_SEEDS: how many, for a long run.
inline std::uint64_t num_seeds() {
  return env_number("COHORT_SEEDS", 2'000);
}

}  // namespace cohort::test
