#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cohort/net/internal/handles.h"
#include "cohort/net/internal/loop/address_list.h"
#include "cohort/net/internal/role.h"
#include "cohort/net/internal/session.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/peer.h"

namespace cohort::net::node_detail {

struct Connection;

/// Who a peer is. Set before anybody has the peer, without a change afterwards.
struct PeerIdentity {
  std::string name, incarnation;
  std::uint64_t session = 0;
};

/// What this process has of a peer's process on the same host.
struct PeerProcess {
  std::shared_ptr<Holder> holder;    ///< of this process's blocks
  std::shared_ptr<MappedHeap> heap;  ///< the peer's
  std::shared_ptr<void> end;         ///< while it is there, the loop is told of the end of the process
};

/// Where a caller listens, of a link: CallerProbes.
struct CallerListener {
  SocketAddress address;        ///< port 0: not known
  bool was_reached = false;     ///< over this link's time, so no firewall is between
  std::shared_ptr<void> probe;  ///< under way, or the pause before it
  std::chrono::milliseconds pause{1};
};

/// What a node knows of a peer.
///
/// Invariants: while `connection` is there, the connection has this as its peer, so each keeps the other
/// until the end. `connection` may still be in its handshake where this side is the caller.
/// Threads: under the mutex of NodeLock, but for `role`, `identity` and `wake`.
struct PeerState : Peer {
  PeerState(Role as, SessionOptions options, Allocate allocate, std::function<void()> has_changed)
      : role(as),
        wake(std::move(has_changed)),
        session(as, options, std::move(allocate), wake, Time::clock::now()) {}

  const std::string& name() const override { return identity.name; }
  const std::string& incarnation() const override { return identity.incarnation; }

  const Role role;
  PeerIdentity identity;
  /// Has the node's own thread write what the session has, and look at its state, soon. Any thread, with any
  /// mutex.
  const std::function<void()> wake;
  std::atomic<bool> wake_is_posted{false};
  Session session;
  PeerProcess process;
  AddressList addresses;    ///< of one that this side calls
  CallerListener listener;  ///< of one that calls this side
  bool gives_up = false;    ///< connect() does not wait for a process to come
  std::shared_ptr<Connection> connection;
  std::string last_error;  ///< why it could not be connected to
  PeerMetrics counts;
};

}  // namespace cohort::net::node_detail
