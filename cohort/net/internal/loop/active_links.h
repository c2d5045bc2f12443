#pragma once

#include <memory>
#include <vector>

#include "cohort/net/internal/loop/connection_table.h"

namespace cohort::net::node_detail {

/// Which threads poll which connections, in place of sleeping until something comes.
///
/// The node's own thread polls for NodeOptions::spin after what came, and so does a thread that waits for an
/// answer. While such a thread waits, the node's own sleeps: two that poll would take two cores.
///
/// Invariants: Connection::num_pollers counts the threads that poll a connection. While it is above 0, the
/// reader of a ring is awake, so the peer sends no wake-ups. While a waiting thread reads a socket, the
/// Poller does not report its bytes, only its end. The last thread that stops polling puts the reader to
/// sleep, and polls once more.
/// Threads: under the mutex of NodeLock. Calls: ConnectionTable.
class ActiveLinks {
 public:
  explicit ActiveLinks(ConnectionTable& table) : table_(table) {}

  /// The node's own thread polls this ring until let_all_sleep(). Nothing changes where it does so already.
  void keep(const std::shared_ptr<Connection>& connection);
  /// The node's own thread polls all sockets until let_all_sleep(): it asks the Poller.
  void keep_sockets() { polls_sockets_ = true; }

  const std::vector<std::shared_ptr<Connection>>& rings() const { return rings_; }
  bool polls_sockets() const { return polls_sockets_; }
  /// Whether the node's own thread has something to poll, and no other one polls.
  bool may_poll() const { return (!rings_.empty() || polls_sockets_) && num_waiters_ == 0; }
  /// The node's own thread stops polling. False where a ring has bytes to read, and stays awake.
  bool let_all_sleep();
  /// After the stop of the node.
  void clear() { rings_.clear(); }

  /// A thread that waits for an answer polls this connection.
  void begin_polling(Connection& connection);
  /// It stops polling. True where there is more in the ring: the node's own thread polls it from now on, and
  /// has to be woken.
  [[nodiscard]] bool end_polling(const std::shared_ptr<Connection>& connection);

 private:
  static bool let_sleep(Connection& connection);

  ConnectionTable& table_;
  std::vector<std::shared_ptr<Connection>> rings_;
  int num_waiters_ = 0;
  bool polls_sockets_ = false;
};

}  // namespace cohort::net::node_detail
