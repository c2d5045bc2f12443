#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/internal/timers.h"

namespace cohort::rpc {

/// The calls that an agent answers, from their arrival until their answer is on its way, and those that were cancelled before
/// they came. Threads: one at a time.
class RunningCalls {
 public:
  using Key = std::pair<std::string, std::uint64_t>;  ///< the caller's name, its number of the call
  struct Call {
    std::stop_source stop;
    Timers::Key timer;
    bool is_kept = false;  ///< others than the caller may need what it makes
  };

  void add(const Key& key, Call call) { calls_.emplace(key, std::move(call)); }
  /// Takes a call out; none where it has ended.
  std::optional<Call> take(const Key& key);

  /// A call was cancelled that is not here: it has yet to come, or has just ended by itself. The latter are forgotten in time.
  void remember_cancelled(const Key& key);
  /// Whether a call that comes has been cancelled. Forgets it.
  bool take_cancelled(const Key& key) { return cancelled_.erase(key) > 0; }

  /// Those of a caller that nobody else needs.
  std::vector<Key> of_caller(const std::string& caller) const;
  std::vector<std::stop_source> stop_sources() const;
  std::size_t size() const { return calls_.size(); }
  bool is_idle() const { return calls_.empty(); }
  /// What is_idle() waits for.
  std::vector<std::string> describe() const;

 private:
  std::map<Key, Call> calls_;
  std::set<Key> cancelled_;
  std::deque<Key> cancelled_order_;
};

}  // namespace cohort::rpc
