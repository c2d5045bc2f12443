#include "cohort/net/internal/loop/connection_table.h"

#include <optional>

namespace cohort::net::node_detail {
namespace {

Poller::Interest interest_of(const Connection& connection) {
  const bool uses_ring = connection.shared && !connection.handshake;
  const bool is_connecting = connection.is_connecting();
  Poller::Interest interest;
  interest.writes = is_connecting || (connection.waits_to_write && !uses_ring);
  interest.reads = !is_connecting && (uses_ring || connection.num_pollers == 0);
  return interest;
}

}  // namespace

void ConnectionTable::add(const std::shared_ptr<Connection>& connection) {
  connection->key = ++last_key_;
  connection->interest = interest_of(*connection);
  poller_.add(connection->socket.get(), connection->key, connection->interest);
  connections_.emplace(connection->key, connection);
  handshakes_.push_back(connection);
}

// The table may be the last to hold the connection.
void ConnectionTable::close(Connection& connection) {
  if (connection.is_closed) return;
  connection.is_closed = true;
  poller_.remove(connection.socket.get());
  connection.socket.close();
  if (connection.handshake) end_handshake(connection);
  connections_.erase(connection.key);
}

void ConnectionTable::close_handshakes() {
  while (!handshakes_.empty()) close(*handshakes_.front());
}

void ConnectionTable::end_handshake(Connection& connection) {
  std::erase_if(handshakes_, [&](const auto& pending) { return pending.get() == &connection; });
}

void ConnectionTable::update_interest(Connection& connection) {
  if (connection.is_closed) return;
  const Poller::Interest interest = interest_of(connection);
  if (interest == connection.interest) return;
  connection.interest = interest;
  poller_.change(connection.socket.get(), connection.key, interest);
}

void ConnectionTable::wait_to_write(Connection& connection) {
  connection.waits_to_write = true;
  update_interest(connection);
}

ConnectionTable::Ready ConnectionTable::next_ready() {
  const std::optional<Poller::Ready> ready = poller_.next_ready();
  const auto found = ready ? connections_.find(ready->key) : connections_.end();
  if (found == connections_.end()) return {};
  return {found->second, ready->is_readable, ready->is_writable};
}

}  // namespace cohort::net::node_detail
