#pragma once

#include <functional>
#include <memory>

#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peer_state.h"

namespace cohort::net::node_detail {

/// Finds out whether a caller of another host is dead once its link is lost: whether anybody listens where it
/// listened. A probe is a TCP connection that is closed at once.
///
/// Invariant: a rejection is a death only where no address was translated on the way, a probe of the last
/// link has got through, and no link is up. Threads: under the mutex of NodeLock. Calls: HandOver.
class CallerProbes {
 public:
  using OnDeath = std::function<void(const std::shared_ptr<PeerState>&)>;

  CallerProbes(LoopCore& core, OnDeath on_death) : core_(core), on_death_(std::move(on_death)) {}

  /// The caller has a link, and said this. Probes once: whether its listener can be reached from here.
  void link_up(const std::shared_ptr<PeerState>& peer, const Hello& hello);
  /// Probes until the caller has a link again, its session has ended, or nobody listens.
  void link_down(const std::shared_ptr<PeerState>& peer);

 private:
  void probe(const std::shared_ptr<PeerState>& peer);
  void on_result(const std::shared_ptr<PeerState>& peer, int error);

  LoopCore& core_;
  const OnDeath on_death_;
};

}  // namespace cohort::net::node_detail
