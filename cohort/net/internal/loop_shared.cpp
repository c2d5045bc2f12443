// Links in shared memory; and which thread reads a link, of shared memory or a socket.
//
// A peer sends a wake-up, a byte over the socket, only where nobody looks at its ring. The node's own thread looks for
// NodeOptions::spin after what came, and so does a thread that waits for an answer (poll_until()). `num_pollers` counts
// those; the last one to go puts the reader to sleep, and looks once more. While a thread waits for an answer, the node's
// own thread sleeps: two that look would take two cores. Of a socket the node's thread asks the poller; a thread that waits for
// an answer takes the socket out of the poller and reads it.
//
// A function of the handler may run on the node's own thread, and turn out to be long. replace_thread() then starts
// another one, which is the node's own from then on (NodeThread). The old one ends after the function.
// A function may also wait on a thread in poll_until(). will_wait() then leaves reading, and handing over, to the node's own
// thread.
#include <sys/socket.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/net/internal/loop.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kConsumeBytes = 32 * 1024;  // after so many the writer may use the room again
constexpr int kConsumesInTurn = 32;               // of one ring, before others have theirs
static_assert(kConsumesInTurn >= kRingBytes / kConsumeBytes + 2, "one turn reads all that a ring has");
constexpr int kReadsOfWakeups = 8;  // of one socket, in turn
constexpr int kLooksBetweenSockets = 16;

// A link that a thread reads in poll_until(). A function of the handler may wait there for another one.
struct PolledLink {
  const void* loop;
  std::shared_ptr<Connection> connection;
  PolledLink* outer;
  bool is_left = false;  // to the node's own thread, while a function waits
};
thread_local PolledLink* polled_link = nullptr;

// Whether this thread is in a function of the handler that it called as it read the link.
bool is_polled_here(const std::shared_ptr<Connection>& connection) {
  for (const PolledLink* link = polled_link; link != nullptr; link = link->outer) {
    if (link->connection == connection && !link->is_left) return true;
  }
  return false;
}

void send_wakeup(Connection& connection) {
  const char byte = 0;
  // A socket that takes none has wake-ups that are not read yet. Other errors are read by the loop.
  static_cast<void>(::send(connection.socket.get(), &byte, sizeof byte, MSG_NOSIGNAL | MSG_DONTWAIT));
}

}  // namespace

void Loop::run(int generation) {
  Time end{};  // of looking
  locked([] {});
  for (unsigned turn = 0; thread_.is_current(generation) && !io_.stopped(); ++turn) {
    if (poll_active()) {
      end = Time::clock::now() + options_.spin;
    } else if (Time::clock::now() >= end || !may_look()) {
      if (let_all_sleep()) io_.run_one();
      end = Time::clock::now() + options_.spin;
    } else {
      std::this_thread::yield();
    }
    if (turn % kLooksBetweenSockets == 0) io_.poll();
  }
}

// Where no thread can be had, the function holds the others up.
void Loop::replace_thread() {
  const std::lock_guard lock(node_.mutex);
  if (node_.is_stopped || !hand_over_.is_turn_of(thread_.id())) return;
  if (thread_.replace(body())) hand_over_.take_turn_away();
}

void Loop::will_wait() {
  leave_polling();
  if (is_own_thread()) return replace_thread();
  const std::lock_guard lock(node_.mutex);
  hand_over_.leave_turn();
}

// From here to poll(): under the mutex. The same as write_socket(), with a ring in its place.
std::size_t Loop::write_ring(Connection& connection) {
  RingWriter& ring = connection.shared->writer();
  try {
    std::size_t size = ring.write(parts_);
    while (size == 0 && !ring.wait_for_room()) size = ring.write(parts_);
    if (size == 0) {
      connection.waits_to_write = true;
    } else if (ring.take_wakeup()) {
      send_wakeup(connection);
    }
    return size;
  } catch (const CommError& error) {
    connection.peer->session.end(DownKind::kFailed, base::message_of(error));
    post_update(connection.peer);
    return 0;
  }
}

bool Loop::read_ring(const std::shared_ptr<Connection>& connection, Time now) {
  PeerState& state = *connection->peer;
  RingReader& ring = connection->shared->reader();
  bool has_read = false;
  std::vector<Message> messages;
  try {
    for (int i = 0; i < kConsumesInTurn && !state.session.ended(); ++i) {
      std::span<const std::byte> bytes = ring.peek();
      if (bytes.empty()) break;
      bytes = bytes.first(std::min(bytes.size(), kConsumeBytes));
      state.session.consume(bytes, now, messages);
      ring.consume(bytes.size());
      if (ring.take_wakeup()) send_wakeup(*connection);
      state.counts.bytes_received += bytes.size();
      has_read = true;
    }
  } catch (const CommError& error) {
    state.session.end(DownKind::kFailed, base::message_of(error));
  }
  take_messages(connection->peer, messages);
  return has_read;
}

void Loop::read_wakeups(const std::shared_ptr<Connection>& connection, Time now) {
  bool is_over = false;
  for (int i = 0; i < kReadsOfWakeups; ++i) {
    const ssize_t size = ::recv(connection->socket.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (size > 0 || (size < 0 && errno == EINTR)) continue;
    is_over = size == 0 || errno != EAGAIN;
    break;
  }
  // What the peer wrote before it went is read first: by one turn, however much somebody still writes.
  read_ring(connection, now);
  if (is_over) return lose(connection, now, "the connection was closed");
  connection->waits_to_write = false;
  active_.keep(connection);
}

bool Loop::poll(const std::shared_ptr<Connection>& connection) {
  if (connection->is_closed) return false;
  if (connection->shared) return poll_ring(connection);
  const std::shared_ptr<PeerState> peer = connection->peer;
  const Time now = Time::clock::now();
  // An end is handed over too: nobody else is told of it.
  if (!read_socket(connection, now) && !peer->session.ended() && !connection->is_closed) return false;
  flush(*peer);
  update_peer(peer, now);
  return true;
}

bool Loop::poll_ring(const std::shared_ptr<Connection>& connection) {
  const bool has_room = connection->waits_to_write && connection->shared->writer().has_room();
  if (!has_room && !connection->shared->reader().has_bytes()) return false;
  if (has_room) connection->waits_to_write = false;
  const std::shared_ptr<PeerState> peer = connection->peer;
  const Time now = Time::clock::now();
  read_ring(connection, now);
  flush(*peer);
  update_peer(peer, now);
  return true;
}

bool Loop::poll_active() {
  bool has_moved = false;
  locked([&] {
    for (const auto& ring : active_.rings()) has_moved = poll(ring) || has_moved;
    if (active_.looks_at_sockets()) has_moved = poll_sockets() || has_moved;
  });
  return has_moved;
}

bool Loop::may_look() {
  const std::lock_guard lock(node_.mutex);
  return active_.may_look();
}

bool Loop::let_all_sleep() {
  const std::lock_guard lock(node_.mutex);
  return active_.let_all_sleep();
}

// Under the mutex.
void Loop::end_polling(const std::shared_ptr<Connection>& connection) {
  if (active_.end_polling(connection)) asio::post(io_, [] {});
}

// This thread will wait within poll_until(): the node's own thread is told of what comes.
void Loop::leave_polling() {
  const std::lock_guard lock(node_.mutex);
  for (PolledLink* link = polled_link; link != nullptr; link = link->outer) {
    if (link->loop == this && !std::exchange(link->is_left, true)) end_polling(link->connection);
  }
}

void Loop::poll_until(const PeerState& state, const std::function<bool()>& is_done) {
  // What it throws would leave the link to nobody.
  const auto asks = [&]() noexcept { return is_done(); };
  if (options_.spin.count() <= 0 || asks()) return;
  std::unique_lock lock(node_.mutex);
  PolledLink link{this, state.connection, polled_link};
  const std::shared_ptr<Connection>& connection = link.connection;
  if (!connection || !connection->has_frames()) return;
  // One thread reads a socket, as each look is a system call. Others sleep until it has handed over what they wait for.
  if (!connection->shared && connection->num_pollers > 0 && !is_polled_here(connection)) return;
  active_.begin_polling(*connection);
  polled_link = &link;
  Time end = Time::clock::now() + options_.spin;
  for (bool is_over = false; !is_over && !connection->is_closed;) {
    const bool has_moved = poll(connection);
    if (has_moved) {
      hand_over_.run(lock, asks);
      if (std::exchange(link.is_left, false)) active_.begin_polling(*connection);
      end = Time::clock::now() + options_.spin;
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

std::shared_ptr<std::byte> Loop::allocate_shared(std::size_t num_bytes) {
  if (heap_) {
    if (auto block = heap_->allocate(num_bytes)) return block;
  }
  return options_.allocate ? options_.allocate(num_bytes) : allocate_aligned(num_bytes);
}

SharedMetrics Loop::shared_metrics() {
  return heap_ ? SharedMetrics{heap_->bytes_in_use(), heap_->bytes_cached()} : SharedMetrics();
}

// Without the mutex, for what is copied may be long.
void Loop::copy_to_heap(const PeerState& state, Message& message) {
  if (!heap_ || message.num_bytes() < kLeastBytesByHandle) return;
  std::shared_ptr<const Handles> handles;
  {
    const std::lock_guard lock(node_.mutex);
    handles = state.session.handles();
  }
  if (handles) handles->copy_to_heap(message);
}

}  // namespace cohort::net::node_detail
