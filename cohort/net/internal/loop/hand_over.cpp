#include "cohort/net/internal/loop/hand_over.h"

#include <utility>

namespace cohort::net::node_detail {

HandOver::HandOver(NodeLock& lock, std::shared_ptr<Handler> handler, std::function<void()> post)
    : node_(lock), handler_(std::move(handler)), post_(std::move(post)) {}

void HandOver::run(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done) {
  const auto self = std::this_thread::get_id();
  if (!is_idle() && turn_ != self) return;
  const bool is_inner = turn_ == self;  // a function of the handler waits in poll_until()
  turn_ = self;
  while (!events_.empty() && turn_ == self) {
    Event event = std::move(events_.front());
    events_.pop_front();
    lock.unlock();
    deliver(std::move(event));
    const bool is_over = is_done && is_done();
    lock.lock();
    if (is_over && turn_ == self && !node_.is_stopped) {
      if (!events_.empty()) post_();
      break;
    }
  }
  if (is_inner || turn_ != self) return;
  turn_ = std::thread::id();
  if (node_.is_stopped) node_.changed.notify_all();
}

void HandOver::leave_turn() {
  if (turn_ != std::this_thread::get_id()) return;
  turn_ = std::thread::id();
  post_();
  if (node_.is_stopped) node_.changed.notify_all();
}

// On whichever thread: a function of the handler that throws ends the process.
void HandOver::deliver(Event event) noexcept {
  if (event.is_new) handler_->on_connect(event.peer);
  if (event.message) handler_->on_message(event.peer, *std::move(event.message));
  if (event.down) handler_->on_down(event.peer, *std::move(event.down));
}

}  // namespace cohort::net::node_detail
