#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cohort/base/threads/wait.h"
#include "cohort/membership/record_store.h"
#include "cohort/membership/status.h"
#include "cohort/net/node.h"

namespace cohort::membership::member_detail {

/// What a member's thread has to handle.
struct Event {
  enum class Type : std::uint8_t { kMessage, kDown, kConnected, kNotConnected, kStore, kStatus };
  Type type = Type::kMessage;
  std::shared_ptr<net::Peer> peer = {};  // of kMessage, kDown and kConnected
  std::string text = {};                 // the message; the address of kConnected and kNotConnected
  std::string why = {};                  // of kNotConnected
  bool is_dead = false;                  // of kDown; of kNotConnected: nobody listens there
  StoreAnswer answer = {};
  MemberStatus status = {};
};

/// Events in the order in which they came. Threads: any.
class EventQueue : public net::Handler {
 public:
  void push(Event event) {
    {
      const std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
    }
    changed_.notify_one();
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_one();
  }
  bool is_stopping() const {
    const std::lock_guard lock(mutex_);
    return is_stopping_;
  }
  /// Waits for an event, the end or the deadline.
  std::deque<Event> take(base::Deadline deadline) {
    std::unique_lock lock(mutex_);
    base::wait(changed_, lock, [&] { return is_stopping_ || !events_.empty(); }, deadline);
    return std::exchange(events_, {});
  }

  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override {
    push({.type = Event::Type::kMessage, .peer = peer, .text = std::move(message.header)});
  }
  void on_down(const std::shared_ptr<net::Peer>& peer, net::Down down) override {
    const bool is_dead = down.kind == net::DownKind::kDied || down.kind == net::DownKind::kLeft;
    push({.type = Event::Type::kDown, .peer = peer, .text = std::move(down.text), .is_dead = is_dead});
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  bool is_stopping_ = false;
};

}  // namespace cohort::membership::member_detail
