#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/poller.h"
#include "cohort/net/internal/session.h"
#include "cohort/net/internal/shared_link.h"
#include "cohort/net/internal/tls/stream.h"

namespace cohort::net::node_detail {

struct PeerState;

/// The handshake of a connection, and what is of no use after it.
struct PendingHandshake {
  PendingHandshake(Handshake begin, Role role, Time end)
      : protocol(std::move(begin)), deadline(end), is_connecting(role == Role::kCaller) {}

  Handshake protocol;
  Time deadline;
  std::string output;  ///< not written yet
  bool is_connecting;
  bool is_rejected = false;  ///< It was told why. What it sends is dropped until it closes, or the deadline.
  std::size_t num_dropped = 0;  ///< bytes
  // Of a local socket.
  base::Fd memory_to_send;  ///< of a link, by its caller
  bool shows_heap = false;  ///< the heap's descriptor follows
  std::vector<base::Fd> descriptors_that_came;
};

/// A socket: first of a handshake, then of a peer.
///
/// Invariants: `handshake` is there until it is done. Afterwards the connection is its peer's, and frames go
/// over `shared` where there is one, else over the socket. ConnectionTable has each connection that is not
/// closed.
/// Threads: under the mutex of NodeLock.
struct Connection {
  explicit Connection(base::Fd fd) : socket(std::move(fd)) {}

  bool is_connecting() const { return handshake && handshake->is_connecting; }
  bool has_frames() const { return !is_closed && !handshake; }

  base::Fd socket;
  std::uint64_t key = 0;      ///< in the poller
  Poller::Interest interest;  ///< as the poller has it
  bool is_closed = false;
  bool waits_to_write = false;
  int num_pollers = 0;                 ///< threads that poll it: neither wake-ups nor the Poller are needed
  std::shared_ptr<PeerState> peer;     ///< a caller's from the start
  std::unique_ptr<TlsStream> tls;      ///< of a TCP socket, where this node has certificates
  std::unique_ptr<SharedLink> shared;  ///< of a local socket
  std::optional<PendingHandshake> handshake;
};

}  // namespace cohort::net::node_detail
