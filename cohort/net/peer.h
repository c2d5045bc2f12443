#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/net/message.h"

/// The other processes, as a node shows them. cohort/net/node.h
namespace cohort::net {

/// Why a peer is gone.
enum class DownKind {
  /// Its process has ended, another one has taken its place, or its node is gone: nobody listens there any
  /// more.
  kDied,
  /// Nothing was heard of it, it has heard nothing of this process and has given it up, or a certificate has
  /// expired or was revoked, so that no new connection can be made. It may live.
  kSilent,
  kLeft,    ///< it said goodbye
  kFailed,  ///< it sent what no peer may send
};
/// The end of a peer: no message comes from it any more.
struct Down {
  DownKind kind = DownKind::kDied;
  std::string text;  ///< "ps/1 died (process 4711)"
  /// Messages to it that it may not have got. Memory that the peer had shown here, and that went back by
  /// handle, may have changed.
  std::vector<Message> unacknowledged;
};

/// Totals of a peer since it was first known, and what is on its way now.
struct PeerMetrics {
  std::uint64_t messages_sent = 0, messages_received = 0;  ///< whole ones
  std::uint64_t bytes_sent = 0, bytes_received = 0;        ///< of sockets
  std::uint64_t bytes_on_the_way = 0;                      ///< sent, and not yet used by the peer
  std::uint64_t bytes_by_handle = 0;  ///< of payloads that the peer has in this process's place
  std::size_t queued = 0;             ///< messages that wait for the peer's window, or the socket
  std::uint64_t bytes_queued = 0;     ///< what is not written of them
  int links = 0;                      ///< connections so far
};

/// Memory of a node that other processes of this host have mapped (Node::allocate_shared()).
struct SharedMetrics {
  std::size_t bytes_in_use = 0;  ///< of blocks that somebody holds, here or there
  std::size_t bytes_cached = 0;  ///< of free ones that keep their memory
};

/// Another process. Lives as long as somebody holds it. Threads: any.
class Peer {
 public:
  virtual ~Peer() = default;
  /// Its name in the job, "ps/1".
  virtual const std::string& name() const = 0;
  /// Differs from that of each other process, also of one with the same name later.
  virtual const std::string& incarnation() const = 0;
  /// Does not wait. Payloads must stay as they are until the message is gone. One of kLeastBytesByHandle
  /// bytes or more may be copied once, to where a peer of this host has it without a copy of its own; one
  /// that `moves` need not be. After the peer's end messages are dropped. Returns the message's number for
  /// replace(), or 0 where it has begun to be written. Throws: UsageError for more than kMaxPayloads payloads
  /// or kMaxHeaderBytes bytes.
  virtual std::uint64_t send(Message message) = 0;
  /// `other`, of the same channel, takes the place of a message that has not begun to be written: nobody
  /// waits for that one any more. `other` then holds that message. Returns false, and does nothing, where it
  /// has begun, and after the peer's end. Throws: as send().
  virtual bool replace(std::uint64_t message, Message& other) = 0;
  /// How bytes go to it now: "shared memory", "a local socket", "TCP" or "TLS"; "nothing" between two
  /// connections.
  virtual std::string transport() const = 0;
  /// What was sent to it and received from it so far.
  virtual PeerMetrics metrics() const = 0;
  /// Whether its end is known here; then send() drops messages.
  virtual bool is_down() const = 0;
  /// For who waits for an answer: reads what comes from the peer, and hands messages over on this thread,
  /// until `is_done()` or until nothing has come for NodeOptions::spin. So the answer need not wake a thread.
  /// Messages may come without an end, so whoever has a deadline lets `is_done()` look at it. `is_done()`
  /// must not throw. Returns at once where another thread reads the peer's socket: then wait for the answer.
  virtual void poll_until(const std::function<bool()>& is_done) = 0;
};

/// What a node calls, one call at a time: on its own thread, or one that is in Peer::poll_until(). Must
/// neither wait nor throw. A function that runs for long holds the others up; see Node::replace_thread() and
/// Node::will_wait().
class Handler {
 public:
  virtual ~Handler() = default;
  /// Somebody has connected. Before its first message.
  virtual void on_connect(const std::shared_ptr<Peer>&) {}
  /// Each message once, those of a channel in order.
  virtual void on_message(const std::shared_ptr<Peer>& peer, Message message) = 0;
  /// The last call for this peer.
  virtual void on_down(const std::shared_ptr<Peer>&, Down) {}
};

}  // namespace cohort::net
