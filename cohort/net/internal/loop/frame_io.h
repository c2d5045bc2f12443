#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/net/internal/loop/connection_table.h"
#include "cohort/net/internal/loop/hand_over.h"
#include "cohort/net/internal/loop/peer_state.h"

namespace cohort::net::node_detail {

/// What came of reading a connection once.
struct ReadResult {
  bool may_have_more = false;        ///< To be read again: bytes came, or a signal interrupted the call.
  std::optional<std::string> error;  ///< The connection is lost, and why. The caller closes it.
};

/// The bytes of connections whose handshake is done: from the socket or the ring to the session, and back.
///
/// Reading and writing are plain system calls that do not wait, or copies of a ring. Their memory is where
/// the bytes belong: a message's payload, or one buffer for all connections.
/// Invariants: messages that came are in the queue of HandOver before a function returns. Nothing is closed
/// here.
/// Threads: under the mutex of NodeLock. Calls: the session, ConnectionTable, HandOver::push().
class FrameIo {
 public:
  FrameIo(ConnectionTable& table, HandOver& hand_over);

  /// One system call. The end of a session, which that call may bring, is no error of the connection.
  ReadResult read_socket(Connection& connection, Time now);
  /// All that the ring has, within one turn. Whether it had something.
  bool read_ring(Connection& connection, Time now);
  /// The wake-ups of a ring, which come over its socket, and then the ring. Returns why the connection is
  /// lost, where it is. The caller closes it then.
  std::optional<std::string> read_wakeups(Connection& connection, Time now);
  /// Frames that came together with the handshake.
  void take_frames(Connection& connection, std::span<const std::byte> frames, Time now);

  /// Writes what the session has to write, as far as its connection takes it. After some of it the rest is
  /// left to the node's own thread, as other threads want the mutex.
  void flush(PeerState& peer);

  /// For whoever reads something else under the mutex.
  std::span<std::byte> buffer() { return buffer_; }

 private:
  std::size_t write_socket(Connection& connection);
  std::size_t write_ring(Connection& connection);
  void push(const std::shared_ptr<PeerState>& peer, std::vector<Message>& messages);

  ConnectionTable& table_;
  HandOver& hand_over_;
  std::vector<std::byte> buffer_;
  std::vector<iovec> parts_;
};

}  // namespace cohort::net::node_detail
