#include "cohort/pipeline/internal/channel.h"

#include <utility>

#include "cohort/base/threads/spin.h"
#include "cohort/base/threads/wait.h"

namespace cohort::pipeline {

template <typename Ready>
void ThreadChannel::wait(std::unique_lock<std::mutex>& lock, const base::Deadline& deadline,
                         const Ready& ready) {
  const auto over = [&] { return closed_.load(std::memory_order_acquire) || ready(); };
  if (!base::wait(changed_, lock, over, deadline)) throw ChannelTimeout();
  // A run that failed ends here, also where there is a message.
  if (closed_.load(std::memory_order_acquire)) throw ChannelClosed();
}

void ThreadChannel::send(Message message, const base::Deadline& deadline) {
  const auto has_room = [this] { return size_.load(std::memory_order_acquire) < capacity_; };
  // Without the lock: mostly the other side is microseconds away, and to sleep costs more.
  base::spin_until([&] { return has_room() || closed_.load(std::memory_order_acquire); }, spin_);
  {
    std::unique_lock lock(mutex_);
    wait(lock, deadline, has_room);
    messages_.push_back(std::move(message));
    size_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
}

Message ThreadChannel::receive(const base::Deadline& deadline) {
  const auto has_message = [this] { return size_.load(std::memory_order_acquire) > 0; };
  base::spin_until([&] { return has_message() || closed_.load(std::memory_order_acquire); }, spin_);
  Message message;
  {
    std::unique_lock lock(mutex_);
    wait(lock, deadline, has_message);
    message = std::move(messages_.front());
    messages_.pop_front();
    size_.fetch_sub(1, std::memory_order_release);
  }
  changed_.notify_all();
  return message;
}

void ThreadChannel::close() {
  {
    const std::lock_guard lock(mutex_);
    // With the lock, so that it does not fall between a waiter's look and its sleep.
    closed_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

}  // namespace cohort::pipeline
