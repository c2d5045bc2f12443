#pragma once

#include <memory>

#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peers.h"
#include "cohort/net/internal/loop/rejections.h"

namespace cohort::net::node_detail {

/// Takes connections through their handshakes, TLS first, and gives each to its peer.
///
/// Invariants: a stranger's connection has no peer before it has proved that it knows the secret. A
/// connection whose handshake is done is its peer's only one: an older one is closed.
/// Threads: under the mutex of NodeLock. Calls: Peers, Rejections, ActiveLinks.
class Handshakes {
 public:
  Handshakes(LoopCore& core, Peers& peers) : core_(core), peers_(peers), rejections_(core, peers) {}

  /// Of a connection whose handshake is not done: its socket is readable, or takes bytes. Then the handshake
  /// may be done, or the connection closed.
  void on_readable(const std::shared_ptr<Connection>& connection);
  void on_writable(const std::shared_ptr<Connection>& connection);

 private:
  void leave_to_other_user(const std::shared_ptr<Connection>& connection);
  void read(const std::shared_ptr<Connection>& connection, Time now);
  void write(const std::shared_ptr<Connection>& connection);
  bool has_tls(const std::shared_ptr<Connection>& connection, Time now);
  bool answer_hello(const std::shared_ptr<Connection>& connection);
  std::shared_ptr<PeerState> peer_of_caller(const Hello& hello);
  void finish_if_done(const std::shared_ptr<Connection>& connection, Time now);
  void finish(const std::shared_ptr<Connection>& connection, Time now);
  void check_listener(PeerState& peer, const Hello& hello) const;

  LoopCore& core_;
  Peers& peers_;
  Rejections rejections_;
};

}  // namespace cohort::net::node_detail
