#pragma once

#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/net/internal/handles.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/loop/active_links.h"
#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/loop/connection_table.h"
#include "cohort/net/internal/loop/hand_over.h"
#include "cohort/net/internal/loop/node_lock.h"
#include "cohort/net/internal/loop/node_thread.h"
#include "cohort/net/internal/loop/peer_state.h"
#include "cohort/net/internal/session.h"
#include "cohort/net/internal/shared_link.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/internal/tls/context.h"
#include "cohort/net/internal/tls/stream.h"
#include "cohort/net/node_options.h"
#include "cohort/net/peer.h"

/// What a node is made of. Included by the sources of the node alone: asio's headers are long.
namespace cohort::net::node_detail {

class Loop : public std::enable_shared_from_this<Loop> {
 public:
  Loop(NodeOptions options, std::shared_ptr<Handler> handler);
  void start();
  void stop();

  std::string listen(const std::string& address);
  const std::string& incarnation() const { return incarnation_; }
  std::shared_ptr<PeerState> connect(const std::string& address, base::Deadline deadline);
  std::vector<std::string> close(base::Deadline deadline);

  void send(PeerState& peer, Message message);
  std::string transport(const PeerState& peer);
  PeerMetrics metrics(const PeerState& peer);
  bool is_down(const PeerState& peer);
  void poll_until(const PeerState& peer, const std::function<bool()>& is_done);
  void replace_thread();
  void will_wait();
  bool is_own_thread() const { return thread_.is_here(); }
  std::shared_ptr<std::byte> allocate_shared(std::size_t num_bytes);
  SharedMetrics shared_metrics();

 private:
  template <typename Fn>
  void locked(const Fn& fn) {
    hand_over_.locked(fn);
  }
  bool may_look();
  NodeThread::Body body();
  void run(int generation);
  std::shared_ptr<PeerState> make_peer(Role role);

  void wait_to_accept(const std::shared_ptr<asio::posix::stream_descriptor>& listener);
  bool accept_all(asio::posix::stream_descriptor& listener);
  void start_link(const std::shared_ptr<PeerState>& peer, Time now);
  std::shared_ptr<Connection> add_connection(base::Fd fd, Role role, std::shared_ptr<PeerState> peer,
                                             Time now);
  void wait_for_sockets();
  bool poll_sockets();
  void on_writable(const std::shared_ptr<Connection>& connection);
  void read(const std::shared_ptr<Connection>& connection);
  void read_handshake(const std::shared_ptr<Connection>& connection, Time now);
  void read_frames(const std::shared_ptr<Connection>& connection, Time now);
  bool read_socket(const std::shared_ptr<Connection>& connection, Time now);
  bool read_ring(const std::shared_ptr<Connection>& connection, Time now);
  void read_wakeups(const std::shared_ptr<Connection>& connection, Time now);
  std::size_t write_ring(Connection& connection);
  bool poll(const std::shared_ptr<Connection>& connection);
  bool poll_ring(const std::shared_ptr<Connection>& connection);
  bool poll_active();
  void end_polling(const std::shared_ptr<Connection>& connection);
  void leave_polling();
  bool let_all_sleep();
  void write_handshake(const std::shared_ptr<Connection>& connection);
  Hello own_hello(Connection& connection) const;
  std::shared_ptr<const Handles> handles_for(Connection& connection, const Hello& hello) const;
  void copy_to_heap(const PeerState& peer, Message& message);
  bool answer_hello(const std::shared_ptr<Connection>& connection);
  void finish_handshake(const std::shared_ptr<Connection>& connection, Time now);
  void fail_handshake(const std::shared_ptr<Connection>& connection, Time now, const CommError& error);
  void drop_input(const std::shared_ptr<Connection>& connection, Time now);
  bool has_tls(const std::shared_ptr<Connection>& connection, Time now);
  void watch(const std::shared_ptr<PeerState>& peer, const Hello& hello);
  void on_process_end(const std::shared_ptr<PeerState>& peer, std::int64_t process);
  void lose(const std::shared_ptr<Connection>& connection, Time now, const std::string& error,
            bool is_rejected = false);
  void take_messages(const std::shared_ptr<PeerState>& peer, std::vector<Message>& messages);
  void flush(PeerState& peer);
  std::size_t write_socket(Connection& connection);
  void update_peer(const std::shared_ptr<PeerState>& peer, Time now);
  void update_all_peers();
  void arm(Time time);
  void post_update(const std::shared_ptr<PeerState>& peer);

  const NodeOptions options_;
  const std::string incarnation_, place_, began_;
  const std::shared_ptr<SharedHeap> heap_;       // null: without shared memory
  const std::unique_ptr<const TlsContext> tls_;  // null: no TLS

  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::steady_timer timer_;
  ConnectionTable table_;
  ActiveLinks active_{table_};
  asio::posix::stream_descriptor sockets_;  // readable while a connection's socket is ready

  NodeLock node_;
  HandOver hand_over_;
  NodeThread thread_;
  // Under the mutex, as the peers' states are.
  std::vector<std::byte> buffer_;  // of whoever reads
  std::set<std::shared_ptr<PeerState>> peers_;
  std::vector<std::shared_ptr<asio::posix::stream_descriptor>> listeners_;
  std::vector<iovec> parts_;
  Time armed_ = Time::max();
  Time next_warning_ = Time::min();  // of a rejected connection
};

}  // namespace cohort::net::node_detail
