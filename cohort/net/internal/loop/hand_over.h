#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "cohort/net/internal/loop/node_lock.h"
#include "cohort/net/peer.h"

namespace cohort::net::node_detail {

/// What the handler is to be told of a peer.
struct Event {
  std::shared_ptr<Peer> peer;
  bool is_new = false;
  std::optional<Message> message;
  std::optional<Down> down;
};

/// The queue of events, and whose turn it is to hand them over to the handler.
///
/// Invariants: events are handed over in the order of push(), each once. One thread at a time has the turn.
/// It hands over without the mutex, and others only push() meanwhile. A function of the handler may wait for
/// an answer, and then hands over on the same thread; or it gives the turn up, and another thread continues.
/// Threads: any, under the mutex of NodeLock where a function does not say otherwise.
/// Calls: the handler, without the mutex; `post`, under it.
class HandOver {
 public:
  /// `post` has the node's own thread call run() soon. `lock` outlives this.
  HandOver(NodeLock& lock, std::shared_ptr<Handler> handler, std::function<void()> post);

  void push(Event&& event) { events_.push_back(std::move(event)); }
  /// Hands over what there is, or leaves it to the thread that has the turn. `lock` is held before and after.
  /// A thread that waits for `is_done` leaves the rest to the node's own thread once it is done, unless the
  /// node has been stopped.
  void run(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done = nullptr);
  /// Without the mutex: runs `fn` under it, then hands over what came of `fn`.
  template <typename Fn>
  void locked(const Fn& fn) {
    std::unique_lock lock(node_.mutex);
    fn();
    run(lock);
  }

  /// Whether no thread has the turn.
  bool is_idle() const { return turn_ == std::thread::id(); }
  /// Whether that thread has the turn, in a function of the handler.
  bool is_turn_of(std::thread::id thread) const { return !is_idle() && turn_ == thread; }
  /// The thread that has the turn loses it: the caller has another one call run().
  void take_turn_away() { turn_ = std::thread::id(); }
  /// This thread, in a function of the handler, leaves the rest to the node's own thread. Elsewhere it does
  /// nothing.
  void leave_turn();

 private:
  void deliver(Event event) noexcept;

  NodeLock& node_;
  const std::shared_ptr<Handler> handler_;
  const std::function<void()> post_;
  std::deque<Event> events_;
  std::thread::id turn_;
};

}  // namespace cohort::net::node_detail
