#include "cohort/pipeline/channel.h"

#include <thread>
#include <utility>

namespace cohort::pipeline {
namespace {

// Looks for a change for a while. Yields, so that whoever makes it can do so on this core.
template <typename Ready>
void look(std::chrono::microseconds patience, const Ready& ready) {
  if (patience.count() <= 0 || ready()) return;
  const auto end = std::chrono::steady_clock::now() + patience;
  do {
    std::this_thread::yield();
  } while (!ready() && std::chrono::steady_clock::now() < end);
}

}  // namespace

template <typename Ready>
void ThreadChannel::wait(std::unique_lock<std::mutex>& lock, const core::Deadline& deadline,
                         const Ready& ready) {
  const auto over = [&] { return closed_.load(std::memory_order_acquire) || ready(); };
  if (deadline.is_never()) {
    changed_.wait(lock, over);
  } else if (!changed_.wait_until(lock, deadline.end(), over)) {
    throw ChannelTimeout();
  }
  if (closed_.load(std::memory_order_acquire)) throw ChannelClosed();
}

void ThreadChannel::send(Message message, const core::Deadline& deadline) {
  const auto has_room = [this] { return size_.load(std::memory_order_acquire) < capacity_; };
  look(spin_, [&] { return has_room() || closed_.load(std::memory_order_acquire); });
  {
    std::unique_lock lock(mutex_);
    wait(lock, deadline, has_room);
    messages_.push_back(std::move(message));
    size_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
}

Message ThreadChannel::receive(const core::Deadline& deadline) {
  const auto has_message = [this] { return size_.load(std::memory_order_acquire) > 0; };
  look(spin_, [&] { return has_message() || closed_.load(std::memory_order_acquire); });
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
    closed_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

}  // namespace cohort::pipeline
