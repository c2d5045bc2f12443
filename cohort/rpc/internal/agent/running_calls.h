#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/encoded.h"
#include "cohort/rpc/internal/timers.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {

/// Which calls of a worker have come, and which of those that have not are cancelled. Calls have their
/// numbers in the order in which they were sent, and may overtake each other. So it takes memory for the
/// calls that are on their way, however many there were. Threads: one at a time.
class CallArrivals {
 public:
  /// Returns whether the call has been cancelled.
  bool add(std::uint64_t sequence);
  /// Does nothing where the call has come.
  void cancel(std::uint64_t sequence);
  /// What it takes memory for.
  std::size_t size() const { return early_.size() + cancelled_.size(); }

 private:
  std::uint64_t next_ = 1;         // all calls before it have come
  std::set<std::uint64_t> early_;  // came, though not all before them have
  std::set<std::uint64_t> cancelled_;
};

/// What a call brings, while it waits until its handler begins. Threads: any.
class WaitingArguments {
 public:
  /// `credit`: their room in the caller's window.
  WaitingArguments(Encoded arguments, std::shared_ptr<void> credit)
      : arguments_(std::move(arguments)), credit_(std::move(credit)) {}
  /// Takes the arguments out, and gives the room back. None where they were taken or dropped.
  std::optional<Encoded> take();
  /// None where the arguments were taken or dropped.
  std::vector<std::shared_ptr<Reference>> references() const;
  /// The handler will not begin. Frees tensors, and gives references up, on this thread.
  void drop() { take(); }

 private:
  mutable std::mutex mutex_;
  std::optional<Encoded> arguments_;
  std::shared_ptr<void> credit_;
};

/// The calls that an agent answers, from their arrival until their answer is on its way, and those that were
/// cancelled before they came. Threads: one at a time.
class RunningCalls {
 public:
  using Key = std::pair<std::string, std::uint64_t>;  ///< the caller's name, its number of the call
  struct RunningCall {
    std::string function;
    std::stop_source stop;
    Timers::Key timer;
    std::shared_ptr<WaitingArguments> arguments;
    std::shared_ptr<RemoteException> why_cancelled;  ///< of a part of a backward: for its handler
    bool is_kept = false;                            ///< others than the caller may need what it makes
    std::vector<std::function<void()>> on_end;  ///< for whoever takes the call out to call, without the mutex
  };

  void add(const Key& key, RunningCall call) { calls_.emplace(key, std::move(call)); }
  /// Of a call; empty where it has ended, or has yet to come.
  std::string function_of(const Key& key) const;
  /// Adds a function to RunningCall::on_end. False where the call has ended, or has yet to come.
  bool on_end(const Key& key, std::function<void()> fn);
  /// Takes a call out; none where it has ended.
  std::optional<RunningCall> take(const Key& key);
  std::map<Key, RunningCall> take_all() { return std::exchange(calls_, {}); }

  CallArrivals& arrivals_of(const std::string& caller) { return arrivals_[caller]; }
  /// The caller is gone.
  void forget_arrivals_of(const std::string& caller) { arrivals_.erase(caller); }

  /// Those of a caller that nobody else needs.
  std::vector<Key> of_caller(const std::string& caller) const;
  std::vector<std::stop_source> stop_sources() const;
  std::size_t size() const { return calls_.size(); }
  bool is_idle() const { return calls_.empty(); }
  /// What is_idle() waits for.
  std::vector<std::string> describe() const;

 private:
  std::map<Key, RunningCall> calls_;
  std::map<std::string, CallArrivals> arrivals_;  // by caller
};

}  // namespace cohort::rpc
