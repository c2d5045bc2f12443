#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/net/node_options.h"
#include "cohort/net/peer.h"

/// Processes of a job that talk to each other: messages arrive once, whatever happens to connections, and a
/// peer that is gone is known. No LibTorch.
///
///     struct Printer : net::Handler {
///       void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override {
///         print(peer->name(), message.header);
///       }
///     };
///     const auto secret = base::Secret::of_process();
///     net::Node node({.name = "trainer/0", .secret = secret}, std::make_shared<Printer>());
///     std::string address = node.listen("127.0.0.1:0");            // tell it the others
///     auto peer = node.connect(other_address, base::Deadline(30s));
///     peer->send({.channel = 1, .header = "hello"});
///     node.close(base::Deadline(10s));                             // says goodbye once all has arrived
namespace cohort::net {

namespace node_detail {
class Loop;
}

/// What connect() does where nobody listens at the address: it tries again, or returns null.
enum class WhenRejected : std::uint8_t { kRetry, kGiveUp };

/// A process among others. One thread does its input and output. Threads: any.
class Node {
 public:
  /// Throws: UsageError for a silence below two heartbeats, and for files of certificates that cannot be
  /// used.
  Node(NodeOptions options, std::shared_ptr<Handler> handler);
  /// Without close() peers see this process's death.
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Listens at "host:port" (port 0: any), "unix:/path" or "unix:@name", and returns the address for others.
  /// With "0.0.0.0:port" or "[::]:port" it listens at all addresses of this host: `host` is the name or
  /// address by which others reach it, by IPv6 where it has no other, and by IPv4 and IPv6 where no name
  /// server says within 5 s which it has; empty: the host's name, which others need not know. Throws:
  /// UsageError for an address that strangers can reach where there is no secret, and after close();
  /// RendezvousError where it cannot listen there, or its address has a name of which no name server says
  /// anything within 15 s.
  std::string listen(const std::string& address, const std::string& host = "");

  /// What peers see as Peer::incarnation() of this process.
  const std::string& incarnation() const;

  /// Connects, and tries again until the deadline. With kGiveUp it returns null once nobody listens at the
  /// address, or the process there is leaving. Throws: RendezvousError that says what stood in the way: an
  /// UnknownHost where the name was not known at last (with kGiveUp: at once), a LookupTimeout where no name
  /// server has answered, a NoAnswer where nothing shows that a process is there.
  std::shared_ptr<Peer> connect(const std::string& address, base::Deadline deadline,
                                WhenRejected when_rejected = WhenRejected::kRetry);

  /// Memory that peers of this host can have without a copy: a payload that lies in it and `moves` goes by
  /// handle. Where there is no such memory it is NodeOptions::allocate's. It may outlive the node. Threads:
  /// any. Throws: std::bad_alloc.
  std::shared_ptr<std::byte> allocate_shared(std::size_t num_bytes);
  /// What of such memory is in use.
  SharedMetrics shared_metrics() const;

  /// Another thread takes the place of the node's own, if that is in a function of the handler: it will wait,
  /// or has run for long. The function's thread ends after it. Does nothing where the node's thread is
  /// elsewhere. Threads: any.
  void replace_thread();
  /// Before a function of the handler waits for a message: another thread hands messages over meanwhile. The
  /// node's own thread is replaced; one in Peer::poll_until() leaves the rest to it. Elsewhere it does
  /// nothing.
  void will_wait();
  /// Whether this is the node's own thread, in a function of the handler.
  bool is_own_thread() const;

  /// Says goodbye to all peers once they have all messages, and ends the thread. Returns the names of those
  /// that did not take theirs before the deadline. Messages that come meanwhile are still handed over.
  std::vector<std::string> close(base::Deadline deadline);
  /// Ends the thread without a goodbye, as the destructor does. Functions of the handler that still run get
  /// five seconds.
  void stop();

 private:
  std::shared_ptr<node_detail::Loop> loop_;
};

}  // namespace cohort::net
