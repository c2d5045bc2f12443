#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cohort/base/secret.h"
#include "cohort/net/tls_options.h"

namespace cohort::net {

/// What can be chosen of a node (cohort/net/node.h).
struct NodeOptions {
  std::string name;  ///< what peers call this process
  /// Of the job; without one only local sockets and loopback are listened on.
  std::optional<base::Secret> secret;
  /// Encrypts TCP, and takes only peers with a certificate. All processes of a job have it, or none. Not for
  /// local sockets.
  std::optional<TlsOptions> tls;
  /// Bytes that each peer may have on its way here; where both sides differ, the lesser one.
  std::size_t window = std::size_t{64} << 20;
  std::chrono::milliseconds heartbeat{250};  ///< between signs of life
  /// After so long without one a peer is given up: above all peers' heartbeats.
  std::chrono::milliseconds silence{2000};
  std::chrono::milliseconds handshake{1000};  ///< the time that one may take
  bool shared_memory = true;  ///< between processes of one host that are connected by a local socket
  /// The most bytes that free shared blocks keep. Long payloads are copied into blocks while such copies take
  /// at most so many bytes; above that they go over a link's rings.
  std::size_t shared_cache = std::size_t{256} << 20;
  /// After what came from a peer, and in Peer::poll_until(): how long a thread polls for more before it
  /// sleeps. It takes a core meanwhile. 0 where there are fewer cores than threads that poll.
  std::chrono::microseconds spin{0};
  /// Memory for payloads that come, aligned to 64 bytes. Else the heap's.
  std::function<std::shared_ptr<std::byte>(std::size_t)> allocate;
};

}  // namespace cohort::net
