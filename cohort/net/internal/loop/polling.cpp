#include "cohort/net/internal/loop/polling.h"

#include <asio/post.hpp>
#include <thread>
#include <utility>

namespace cohort::net::node_detail {
namespace {

// A link that this thread reads in poll_until(). A function of the handler may wait there for another one.
struct PolledLink {
  const Polling* owner;
  std::shared_ptr<Connection> connection;
  PolledLink* outer;
  bool is_left = false;  // to the node's own thread, while a function waits
};
thread_local PolledLink* polled_link = nullptr;

// Whether this thread is in a function of the handler that it called as it read the connection.
bool is_polled_here(const std::shared_ptr<Connection>& connection) {
  for (const PolledLink* link = polled_link; link != nullptr; link = link->outer) {
    if (link->connection == connection && !link->is_left) return true;
  }
  return false;
}

}  // namespace

// Other threads than the one that reads a socket sleep until that one has handed over what they wait for.
bool Polling::may_poll(const std::shared_ptr<Connection>& connection) const {
  if (!connection || !connection->has_frames()) return false;
  return connection->shared || connection->num_pollers == 0 || is_polled_here(connection);
}

void Polling::poll_until(const PeerState& peer, const std::function<bool()>& is_done) {
  // What it throws would leave the link to nobody.
  const auto asks = [&]() noexcept { return is_done(); };
  if (core_.options.spin.count() <= 0 || asks()) return;
  std::unique_lock lock(core_.lock.mutex);
  PolledLink link{this, peer.connection, polled_link};
  const std::shared_ptr<Connection>& connection = link.connection;
  if (!may_poll(connection)) return;
  core_.active.begin_polling(*connection);
  polled_link = &link;
  Time end = Time::clock::now() + core_.options.spin;
  for (bool is_over = false; !is_over && !connection->is_closed;) {
    const bool has_moved = peers_.poll(connection);
    if (has_moved) {
      core_.hand_over.run(lock, asks);
      if (std::exchange(link.is_left, false)) core_.active.begin_polling(*connection);
      end = Time::clock::now() + core_.options.spin;
    } else if (Time::clock::now() >= end) {
      break;
    }
    lock.unlock();  // `is_done()` may take another mutex
    if (!has_moved) std::this_thread::yield();
    is_over = asks();
    lock.lock();
  }
  polled_link = link.outer;
  end_polling(connection);
}

void Polling::leave() {
  const std::lock_guard lock(core_.lock.mutex);
  for (PolledLink* link = polled_link; link != nullptr; link = link->outer) {
    if (link->owner == this && !std::exchange(link->is_left, true)) end_polling(link->connection);
  }
}

// Under the mutex.
void Polling::end_polling(const std::shared_ptr<Connection>& connection) {
  if (core_.active.end_polling(connection)) asio::post(core_.io, [] {});
}

}  // namespace cohort::net::node_detail
