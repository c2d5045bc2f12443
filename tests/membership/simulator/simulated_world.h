#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::test {

using SimTime = std::chrono::steady_clock::time_point;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/// A clock that jumps to the next event, hosts that stop, and a network that delays, cuts and loses. A seed
/// decides all of it.
class SimulatedWorld {
 public:
  SimulatedWorld(std::uint64_t seed, int num_hosts)
      : random_(seed),
        num_hosts_(num_hosts),
        stopped_until_(static_cast<std::size_t>(num_hosts)),
        cut_until_(static_cast<std::size_t>(num_hosts * num_hosts)) {}

  SimTime now() const { return now_; }
  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  bool chance(int percent) { return pick(100) < static_cast<std::uint64_t>(percent); }
  milliseconds between(int least, int most) {
    return milliseconds(least + static_cast<int>(pick(static_cast<std::uint64_t>(most - least + 1))));
  }
  void at(SimTime time, std::function<void()> run) {
    events_.push({std::max(time, now_), next_order_++, std::move(run)});
  }
  /// On a host, so not while it is stopped.
  void on_host(int host, SimTime time, std::function<void()> run) {
    at(time, [this, host, run = std::move(run)] {
      if (now_ >= stopped_until(host)) return run();
      on_host(host, stopped_until(host), run);
    });
  }
  std::uint64_t num_events() const { return next_order_; }
  /// For a person who looks for a fault: COHORT_TRACE=1.
  template <typename Text>
  void trace(const Text& text) const {
    static const bool is_on = std::getenv("COHORT_TRACE") != nullptr;
    if (!is_on) return;
    const auto time =
        std::chrono::duration_cast<milliseconds>(now_ - SimTime() - std::chrono::hours(10)).count();
    std::fprintf(stderr, "%6ld %s\n", static_cast<long>(time), text().c_str());
  }
  void fail(const std::string& what) {
    if (error_.empty()) error_ = what;
  }
  const std::string& error() const { return error_; }
  /// Runs events until `time`, or until `is_over()`.
  template <typename Condition>
  void run_until(SimTime time, const Condition& is_over) {
    while (!events_.empty() && error_.empty() && !is_over() && events_.top().time <= time) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      event.run();
    }
    if (error_.empty() && !is_over()) now_ = time;
  }

  void stop_host(int host, milliseconds time) { stopped_until(host) = now_ + time; }
  void cut(int from, int to, SimTime until) {
    SimTime& end = cut_until_[static_cast<std::size_t>(from * num_hosts_ + to)];
    end = std::max(end, until);
  }
  bool is_cut(int from, int to) const { return cut_end(from, to) > now_; }
  /// When the last cut between two hosts, or stop of one of them, ended or ends.
  SimTime end_of_trouble(int a, int b) const {
    return std::max({cut_end(a, b), cut_end(b, a), stopped_until_[static_cast<std::size_t>(a)],
                     stopped_until_[static_cast<std::size_t>(b)]});
  }
  void set_slow(int percent) { slow_percent_ = percent; }

  /// After so long without a sign of life a stream ends.
  void set_give_up(milliseconds time) { give_up_ = time; }
  milliseconds give_up() const { return give_up_; }
  /// A message of a stream, which arrives in order. A cut that lasts longer than give_up() ends the stream:
  /// `lost` runs on both sides then.
  void carry(int from, int to, const std::string& stream, std::function<void()> deliver,
             const std::function<void()>& lost) {
    ++num_messages;
    const SimTime open = from == to ? now_ : std::max(now_, cut_end(from, to));
    if (open - now_ > give_up_) {
      if (lost) at(now_ + give_up_, lost);
      return;
    }
    const auto delay = from == to
                           ? microseconds(10)
                           : microseconds(chance(slow_percent_) ? 1'000 + pick(300'000) : 100 + pick(1'500));
    SimTime& last = last_arrival_[stream];
    last = std::max(last, open + delay);
    on_host(to, last, std::move(deliver));
  }

  std::uint64_t num_messages = 0;

 private:
  struct Event {
    SimTime time;
    std::uint64_t order;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return std::tie(time, order) > std::tie(other.time, other.order);
    }
  };
  SimTime& stopped_until(int host) { return stopped_until_[static_cast<std::size_t>(host)]; }
  SimTime cut_end(int from, int to) const {
    return cut_until_[static_cast<std::size_t>(from * num_hosts_ + to)];
  }

  std::mt19937_64 random_;
  const int num_hosts_;
  SimTime now_ = SimTime() + std::chrono::hours(10);
  std::uint64_t next_order_ = 0;
  std::priority_queue<Event> events_;
  std::vector<SimTime> stopped_until_, cut_until_;
  std::map<std::string, SimTime> last_arrival_;
  int slow_percent_ = 0;
  milliseconds give_up_{2'000};
  std::string error_;
};

}  // namespace cohort::test
