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

namespace cohort::rpc {

/// A mutex for each key, which no thread waits for: a function is called once its key is locked for it. The
/// functions of one key get the lock in the order in which they were given. A lock may be held long after
/// its function has returned. Keys do not wait for each other. A key takes memory while it is locked.
/// Threads: any.
class KeyedAsyncMutex : public std::enable_shared_from_this<KeyedAsyncMutex> {
 public:
  using Key = std::pair<std::string, std::string>;  ///< a worker, a channel

  /// The lock of a key, which its last holder releases at the latest.
  class Lock {
   public:
    Lock(std::shared_ptr<KeyedAsyncMutex> mutex, Key key) : mutex_(std::move(mutex)), key_(std::move(key)) {}
    ~Lock() { unlock(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    /// The next function begins, on this thread as a rule. Once: a further call does nothing.
    void unlock();

   private:
    const std::shared_ptr<KeyedAsyncMutex> mutex_;
    const Key key_;
    std::atomic<bool> is_unlocked_{false};
  };
  /// Must not throw.
  using Function = std::function<void(std::shared_ptr<Lock> lock)>;

  /// Calls `fn` once `key` is locked for it: at once, or later by a thread that unlocks the key.
  void lock(const Key& key, Function fn);
  /// Drops the functions that wait, and those that are given from now on.
  void clear();
  /// Keys that are locked.
  std::size_t num_keys() const;

 private:
  struct Queue {
    std::deque<Function> waiting;
    bool is_locked = false;
    bool is_calling = false;  // a thread is in call_waiting()
  };
  void call_waiting(const Key& key, std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;  // of all below
  std::map<Key, Queue> queues_;
  bool is_cleared_ = false;
};

}  // namespace cohort::rpc
