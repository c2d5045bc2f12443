#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>

#include "cohort/base/files/fd.h"
#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/poller.h"

namespace cohort::net::node_detail {

/// The connections that are not closed, and which of their sockets are ready.
///
/// Invariants: the poller has the socket of each connection of the table, and no other. It is asked for what
/// the connection waits for: `interest` says. No handshake of handshakes() is done, and the oldest is the
/// first.
/// Threads: under the mutex of NodeLock. Calls: nothing above it.
class ConnectionTable {
 public:
  /// Takes a connection that begins its handshake. Throws: SystemError; then nothing has changed.
  void add(const std::shared_ptr<Connection>& connection);
  /// Its socket too. Does nothing where it is closed already.
  void close(Connection& connection);
  /// Closes all whose handshakes are not done.
  void close_handshakes();

  const std::list<std::shared_ptr<Connection>>& handshakes() const { return handshakes_; }
  /// Its handshake is done: the connection has frames from now on.
  void end_handshake(Connection& connection);

  /// To be called after each change of what update_interest() looks at: the handshake, `shared`,
  /// `num_pollers` and `waits_to_write`.
  void update_interest(Connection& connection);
  /// Its socket takes no more bytes now.
  void wait_to_write(Connection& connection);

  struct Ready {
    std::shared_ptr<Connection> connection;  ///< null: none is ready
    bool is_readable = false, is_writable = false;
  };
  /// One that is ready now, without waiting. The others have their turn at the next calls.
  Ready next_ready();
  /// Readable while a connection is ready. Throws: SystemError.
  base::Fd readiness() const { return poller_.duplicate(); }

 private:
  Poller poller_;
  std::map<std::uint64_t, std::shared_ptr<Connection>> connections_;  // by the poller's keys
  std::uint64_t last_key_ = 0;
  std::list<std::shared_ptr<Connection>> handshakes_;
};

}  // namespace cohort::net::node_detail
