#pragma once

#include <asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "cohort/base/files/fd.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/loop/caller_probes.h"
#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peer_state.h"

namespace cohort::net::node_detail {

/// The peers of a node: what follows from the states of their sessions, and one timer for all of them.
///
/// Invariants: a peer is in all() until its end is known here, or our goodbye to it is written and its
/// connection is gone. The timer fires at the earliest next_time() of a session, or deadline of a handshake.
/// A caller's session that wants a link gets a connection, and is told when the connection is lost.
/// Threads: under the mutex of NodeLock. Calls: all of LoopCore.
class Peers {
 public:
  using Make = std::function<std::shared_ptr<PeerState>(Role role)>;

  Peers(LoopCore& core, Make make);

  const std::set<std::shared_ptr<PeerState>>& all() const { return peers_; }
  /// A new peer, without a connection.
  std::shared_ptr<PeerState> add(Role role);
  /// Who called this node, by the caller's numbers. Null where it is not known, or its session has ended.
  std::shared_ptr<PeerState> find_caller(std::uint64_t session, const std::string& incarnation) const;
  /// After the stop of the node: ends all sessions, and closes their connections. No handler is told.
  void stop();

  /// A connection that begins its handshake; `peer` of a caller. Throws: SystemError.
  std::shared_ptr<Connection> add_connection(base::Fd fd, Role role, std::shared_ptr<PeerState> peer,
                                             Time now);
  /// Closes a connection. Its peer, where it is the peer's, is told, and a caller's tries again.
  /// `connect_error`: an errno, where there was no connection yet; ECONNREFUSED: nobody listens there;
  /// ETIMEDOUT: nobody answers.
  void lose(const std::shared_ptr<Connection>& connection, Time now, const std::string& error,
            int connect_error = 0);

  /// Of a connection whose handshake is done: its socket is readable, or takes bytes again.
  void on_readable(const std::shared_ptr<Connection>& connection);
  void on_writable(const std::shared_ptr<Connection>& connection);
  /// Reads a connection whose handshake is done, in place of waiting for it. Whether something has come.
  bool poll(const std::shared_ptr<Connection>& connection);

  /// Writes what the session has.
  void flush_and_update(const std::shared_ptr<PeerState>& peer, Time now);
  /// What follows from the session's state: its end, a new link, the time of its next tick.
  void update(const std::shared_ptr<PeerState>& peer, Time now);
  /// Has the end of a peer's process noticed, where it is of this host.
  void watch_process(const std::shared_ptr<PeerState>& peer, const Hello& hello);
  /// Has the end of a caller's process of another host noticed, where its listener can be reached. After
  /// watch_process().
  void watch_listener(const std::shared_ptr<PeerState>& peer, const Hello& hello) {
    probes_.link_up(peer, hello);
  }

 private:
  bool read(const std::shared_ptr<Connection>& connection, Time now);
  void start_link(const std::shared_ptr<PeerState>& peer, Time now);
  void remove(const std::shared_ptr<PeerState>& peer);
  void on_process_end(const std::shared_ptr<PeerState>& peer, std::int64_t process);
  void on_time();
  void arm(Time time);

  LoopCore& core_;
  const Make make_;
  std::set<std::shared_ptr<PeerState>> peers_;
  CallerProbes probes_;
  asio::steady_timer timer_;
  Time armed_ = Time::max();
};

}  // namespace cohort::net::node_detail
