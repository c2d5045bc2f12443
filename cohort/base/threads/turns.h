#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace cohort::base {

/// Has functions of one key begin one after another, in the order in which they were given: each once the
/// turn of the one before has ended, which may be long after its function has returned. Keys do not wait
/// for each other. A key takes memory while it has a turn. Threads: any.
class Turns : public std::enable_shared_from_this<Turns> {
 public:
  using Key = std::pair<std::string, std::string>;  ///< a worker, a channel

  /// A function's turn, which ends with its last holder at the latest.
  class Turn {
   public:
    Turn(std::shared_ptr<Turns> turns, Key key) : turns_(std::move(turns)), key_(std::move(key)) {}
    ~Turn() { end(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    /// The next function begins, on this thread as a rule. Once: a further call does nothing.
    void end();

   private:
    const std::shared_ptr<Turns> turns_;
    const Key key_;
    std::atomic<bool> has_ended_{false};
  };
  /// Must not throw.
  using Begin = std::function<void(std::shared_ptr<Turn> turn)>;

  /// Calls `begin` when it is its turn: at once, or later by a thread that ends a turn.
  void take(const Key& key, Begin begin);
  /// Drops the functions that wait, and those that are given from now on.
  void clear();
  /// Keys that have a turn.
  std::size_t num_keys() const;

 private:
  struct Queue {
    std::deque<Begin> waiting;
    bool has_turn = false;      // one has begun and not ended
    bool is_beginning = false;  // a thread is in begin_waiting()
  };
  void begin_waiting(const Key& key, std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;  // of all below
  std::map<Key, Queue> queues_;
  bool is_cleared_ = false;
};

}  // namespace cohort::base
