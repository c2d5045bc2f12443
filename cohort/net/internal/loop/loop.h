#pragma once

#include <asio/executor_work_guard.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/net/internal/loop/handshakes.h"
#include "cohort/net/internal/loop/listeners.h"
#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/node_thread.h"
#include "cohort/net/internal/loop/peers.h"
#include "cohort/net/internal/loop/polling.h"

namespace cohort::net::node_detail {

/// What a Node is made of: owns the parts, gives each call to the part whose affair it is, and is what the
/// node's own thread runs.
///
/// Parts call only parts that are declared above them here, or in LoopCore.
/// Threads: any, without the mutex.
class Loop : public std::enable_shared_from_this<Loop> {
 public:
  Loop(NodeOptions options, std::shared_ptr<Handler> handler);
  void start();
  /// Functions of the handler may still run, on any thread. They get five seconds.
  void stop();

  const std::string& incarnation() const { return core_.self.incarnation; }
  std::string listen(const std::string& address, const std::string& host) {
    return listeners_.listen(address, host);
  }
  std::shared_ptr<Peer> connect(const std::string& address, base::Deadline deadline,
                                bool gives_up_if_rejected);
  std::vector<std::string> close(base::Deadline deadline);

  std::shared_ptr<std::byte> allocate_shared(std::size_t num_bytes);
  SharedMetrics shared_metrics() const;
  void replace_thread();
  void will_wait();
  bool is_own_thread() const { return thread_.is_here(); }

  // Of a peer.
  std::uint64_t send(PeerState& peer, Message message);
  bool replace(PeerState& peer, std::uint64_t message, Message& other);
  std::string transport(const PeerState& peer);
  PeerMetrics metrics(const PeerState& peer);
  bool is_down(const PeerState& peer);
  void poll_until(const PeerState& peer, const std::function<bool()>& is_done) {
    polling_.poll_until(peer, is_done);
  }

 private:
  std::vector<SocketAddress> resolve_by(const std::string& address, base::Deadline deadline, bool gives_up);
  void check_open();
  std::shared_ptr<PeerState> make_peer(Role role);
  void update_soon(const std::shared_ptr<PeerState>& peer);
  void copy_to_heap(const PeerState& peer, Message& message);
  NodeThread::Body body();
  void run(int generation);
  bool poll_active();
  bool let_all_sleep();
  void wait_for_sockets();
  bool poll_sockets();

  LoopCore core_;
  Peers peers_;
  Handshakes handshakes_;
  Listeners listeners_;
  Polling polling_;
  NodeThread thread_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::posix::stream_descriptor sockets_;  // readable while a connection's socket is ready
};

}  // namespace cohort::net::node_detail
