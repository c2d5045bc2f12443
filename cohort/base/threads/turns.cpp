// A turn may end while its function still runs: a call that is cancelled ends at once, and so would all
// that wait for it, each within the one before. So one thread at a time begins the functions of a key, in a
// loop. A turn that ends meanwhile leaves the next one to that thread.
#include "cohort/base/threads/turns.h"

namespace cohort::base {

void Turns::Turn::end() {
  if (has_ended_.exchange(true)) return;
  std::unique_lock lock(turns_->mutex_);
  turns_->queues_.at(key_).has_turn = false;
  turns_->begin_waiting(key_, lock);
}

void Turns::take(const Key& key, Begin begin) {
  std::unique_lock lock(mutex_);
  if (is_cleared_) {
    lock.unlock();  // before `begin` is destroyed, which may hold a turn
    begin = nullptr;
    return;
  }
  queues_[key].waiting.push_back(std::move(begin));
  begin_waiting(key, lock);
}

void Turns::clear() {
  std::deque<std::deque<Begin>> dropped;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  is_cleared_ = true;
  for (auto& [key, queue] : queues_) dropped.push_back(std::exchange(queue.waiting, {}));
}

std::size_t Turns::num_keys() const {
  const std::lock_guard lock(mutex_);
  return queues_.size();
}

void Turns::begin_waiting(const Key& key, std::unique_lock<std::mutex>& lock) {
  Queue& queue = queues_.at(key);
  if (queue.is_beginning) return;
  queue.is_beginning = true;
  while (!queue.has_turn && !queue.waiting.empty()) {
    Begin begin = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    queue.has_turn = true;
    lock.unlock();
    begin(std::make_shared<Turn>(shared_from_this(), key));
    begin = nullptr;
    lock.lock();
  }
  queue.is_beginning = false;
  if (!queue.has_turn) queues_.erase(key);
}

}  // namespace cohort::base
