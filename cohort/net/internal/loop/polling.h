#pragma once

#include <functional>

#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peers.h"

namespace cohort::net::node_detail {

/// Threads that read a link themselves while they wait for an answer: the answer need wake no thread.
///
/// Invariants: one thread polls a socket in this way, as each poll is a system call; any number poll a ring.
/// A thread that polls yields between two polls. What it reads it hands over itself, so a function of the
/// handler may wait in turn.
/// Threads: any, without the mutex. Calls: Peers::poll(), HandOver, ActiveLinks.
class Polling {
 public:
  Polling(LoopCore& core, Peers& peers) : core_(core), peers_(peers) {}

  /// Peer::poll_until().
  void poll_until(const PeerState& peer, const std::function<bool()>& is_done);
  /// Before this thread waits for something else, in a function of the handler that poll_until() has called:
  /// the node's own thread is told of what comes until that function returns.
  void leave();

 private:
  bool may_poll(const std::shared_ptr<Connection>& connection) const;
  void end_polling(const std::shared_ptr<Connection>& connection);

  LoopCore& core_;
  Peers& peers_;
};

}  // namespace cohort::net::node_detail
