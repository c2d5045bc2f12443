// A lock may be released while its function still runs: a call that is cancelled ends at once, and so would
// all that wait for it, each within the one before. So one thread at a time calls the functions of a key, in
// a loop. A thread that unlocks the key meanwhile leaves the next function to that thread.
#include "cohort/rpc/internal/keyed_async_mutex.h"

namespace cohort::rpc {

void KeyedAsyncMutex::Lock::unlock() {
  if (is_unlocked_.exchange(true)) return;
  std::unique_lock lock(mutex_->mutex_);
  mutex_->queues_.at(key_).is_locked = false;
  mutex_->call_waiting(key_, lock);
}

void KeyedAsyncMutex::lock(const Key& key, Function fn) {
  std::unique_lock lock(mutex_);
  if (is_cleared_) {
    lock.unlock();  // before `fn` is destroyed, which may hold a lock of a key
    fn = nullptr;
    return;
  }
  queues_[key].waiting.push_back(std::move(fn));
  call_waiting(key, lock);
}

void KeyedAsyncMutex::clear() {
  std::deque<std::deque<Function>> dropped;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  is_cleared_ = true;
  for (auto& [key, queue] : queues_) dropped.push_back(std::exchange(queue.waiting, {}));
}

std::size_t KeyedAsyncMutex::num_keys() const {
  const std::lock_guard lock(mutex_);
  return queues_.size();
}

void KeyedAsyncMutex::call_waiting(const Key& key, std::unique_lock<std::mutex>& lock) {
  Queue& queue = queues_.at(key);
  if (queue.is_calling) return;
  queue.is_calling = true;
  while (!queue.is_locked && !queue.waiting.empty()) {
    Function fn = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    queue.is_locked = true;
    lock.unlock();
    fn(std::make_shared<Lock>(shared_from_this(), key));
    fn = nullptr;
    lock.lock();
  }
  queue.is_calling = false;
  if (!queue.is_locked) queues_.erase(key);
}

}  // namespace cohort::rpc
