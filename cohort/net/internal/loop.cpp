// One thread runs the loop; every thread may send. A mutex guards all sessions. A thread that sends writes to the socket
// itself while the socket takes bytes; else the loop writes once the socket is writable. What a session gives (messages, an
// end) is queued under the mutex and handed over without it, so a handler may send and close. One thread at a time hands
// over, which keeps the order: the loop's, or one that reads a shared link (loop_shared.cpp).
//
// asio says when a listener or a process (its pidfd) is ready, and when one of the connections' sockets is: a Poller has
// those, as a thread that reads a socket itself must be able to take it out (loop_shared.cpp). Reading and writing are plain
// system calls, whose buffers are the memory where bytes belong.
#include "cohort/net/internal/loop.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/host.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kBufferBytes = 256 * 1024;
// In turn, under the mutex.
constexpr std::size_t kSocketFlushBytes = 256 * 1024, kRingFlushBytes = 4 * 1024 * 1024;
constexpr std::size_t kMaxParts = 1024;       // of a system call (IOV_MAX)
constexpr std::chrono::seconds kPatience(5);  // for functions of the handler, at the end

std::string new_incarnation() {
  return std::to_string(std::chrono::system_clock::now().time_since_epoch().count()) + "-" +
         base::random_word();
}
std::uint64_t new_number() {
  return std::stoull(base::random_word().substr(0, 15), nullptr, 16) + 1;
}

SessionOptions session_options(const NodeOptions& node) {
  SessionOptions options;
  options.window = node.window;
  options.heartbeat = node.heartbeat;
  options.silence = node.silence;
  return options;
}

// A peer as users have it. It may outlive its node.
class LoopPeer final : public PeerState {
 public:
  LoopPeer(std::weak_ptr<Loop> loop, Role role, const NodeOptions& options, std::function<void()> has_changed)
      : PeerState(role, session_options(options),
                  options.allocate ? options.allocate : Allocate(allocate_aligned), std::move(has_changed)),
        loop_(std::move(loop)) {}

  void send(Message message) override {
    if (const auto loop = loop_.lock()) loop->send(*this, std::move(message));
  }
  std::string transport() const override {
    const auto loop = loop_.lock();
    return loop ? loop->transport(*this) : "nothing";
  }
  PeerMetrics metrics() const override {
    const auto loop = loop_.lock();
    return loop ? loop->metrics(*this) : counts;
  }
  bool is_down() const override {
    const auto loop = loop_.lock();
    return !loop || loop->is_down(*this);
  }
  void poll_until(const std::function<bool()>& is_done) override {
    if (const auto loop = loop_.lock()) loop->poll_until(*this, is_done);
  }

 private:
  const std::weak_ptr<Loop> loop_;
};

}  // namespace

Loop::Loop(NodeOptions options, std::shared_ptr<Handler> handler)
    : options_(std::move(options)),
      incarnation_(new_incarnation()),
      place_(place_of_process()),
      began_(base::process_start(std::to_string(::getpid()))),
      heap_(options_.shared_memory ? std::make_shared<SharedHeap>(options_.shared_cache) : nullptr),
      tls_(options_.tls ? std::make_unique<const TlsContext>(*options_.tls) : nullptr),
      work_(io_.get_executor()),
      timer_(io_),
      sockets_(io_, table_.readiness().release()),
      hand_over_(node_, std::move(handler), [this] { asio::post(io_, [this] { locked([] {}); }); }),
      thread_(node_),
      buffer_(kBufferBytes) {}

void Loop::start() {
  const std::lock_guard lock(node_.mutex);
  wait_for_sockets();
  thread_.start(body());
}

NodeThread::Body Loop::body() {
  return [self = shared_from_this()](int generation) { self->run(generation); };
}

// Functions of the handler may still run, on any thread. One that takes longer than kPatience is left.
void Loop::stop() {
  const base::Deadline deadline(kPatience);
  std::unique_lock lock(node_.mutex);
  node_.is_stopped = true;
  io_.stop();
  thread_.stop(lock, deadline);
  table_.close_handshakes();
  for (const auto& peer : peers_) {
    if (peer->connection) table_.close(*peer->connection);
    peer->connection.reset();  // each holds the other
    peer->process.end.reset();
    peer->session.end(DownKind::kLeft, "was left");
  }
  peers_.clear();
  listeners_.clear();
  active_.clear();
  node_.changed.notify_all();
  if (hand_over_.is_idle()) hand_over_.run(lock);  // what was left to the loop
  const auto is_quiet = [&] {
    const bool has_no_turn = hand_over_.is_idle() || hand_over_.is_turn_of(std::this_thread::get_id());
    return thread_.num_replaced_elsewhere() <= 0 && has_no_turn;
  };
  base::wait(node_.changed, lock, is_quiet, deadline);
}

std::shared_ptr<PeerState> Loop::make_peer(Role role) {
  // It is called by whoever drops a message, who may hold any mutex, also after the node's end.
  const auto later = std::make_shared<std::weak_ptr<PeerState>>();
  auto peer = std::make_shared<LoopPeer>(weak_from_this(), role, options_, [self = weak_from_this(), later] {
    const auto loop = self.lock();
    const auto peer = later->lock();
    if (loop && peer && !peer->wake_is_posted.exchange(true)) loop->post_update(peer);
  });
  *later = peer;
  peers_.insert(peer);
  return peer;
}

std::string Loop::listen(const std::string& text) {
  const SocketAddress address = resolve(text);
  if (!options_.secret && !address.is_unix() && !address.is_loopback()) {
    throw UsageError("net.listen",
                     base::concat("strangers can reach ", text, ", and this process has no secret"),
                     "COHORT_SECRET_FILE, or a loopback address");
  }
  std::string bound;
  base::Fd fd = listen_at(address, bound);
  const std::lock_guard lock(node_.mutex);
  listeners_.push_back(std::make_shared<asio::posix::stream_descriptor>(io_, fd.release()));
  wait_to_accept(listeners_.back());
  return bound;
}

// Under the mutex, on any thread. As long as the other side reads a long message, more of it can be written. So the loop
// continues after a part of it: others want the mutex meanwhile.
void Loop::flush(PeerState& state) {
  const std::shared_ptr<Connection> connection = state.connection;
  if (!connection || !connection->has_frames() || connection->waits_to_write) return;
  std::size_t left = connection->shared ? kRingFlushBytes : kSocketFlushBytes;
  while (state.session.wants_to_write()) {
    if (left == 0) {
      state.wake();
      return;
    }
    parts_.clear();
    state.session.gather(parts_);
    if (parts_.empty()) return;
    const std::size_t size = connection->shared ? write_ring(*connection) : write_socket(*connection);
    if (size == 0) return;
    state.counts.bytes_sent += size;
    state.session.written(size, Time::clock::now());
    left -= std::min(left, size);
  }
}

// Writes of `parts_` what the socket takes, and returns how many bytes. 0: it is written once the socket is writable, or
// there is an error, which the loop reads.
std::size_t Loop::write_socket(Connection& connection) {
  msghdr message{};
  message.msg_iov = parts_.data();
  message.msg_iovlen = std::min(parts_.size(), kMaxParts);
  ssize_t size = -1;
  do {
    size = connection.tls ? connection.tls->write(parts_)
                          : ::sendmsg(connection.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  if (size < 0 && errno == EAGAIN) table_.wait_to_write(connection);
  return size < 0 ? 0 : static_cast<std::size_t>(size);
}

// What follows from a session's state: its end, a new link, the time of its next tick.
void Loop::update_peer(const std::shared_ptr<PeerState>& peer, Time now) {
  PeerState& state = *peer;
  const bool is_time = now >= state.session.next_time();
  if (is_time && state.session.is_up() && state.connection && state.connection->num_pollers > 0) {
    // A thread in poll_until() that is in a function of the handler reads nothing, and nobody else is told that something has
    // come. Such a peer is not silent.
    const std::shared_ptr<Connection> polled = state.connection;
    polled->shared ? read_ring(polled, now) : read_socket(polled, now);
  }
  if (is_time) {
    state.session.tick(now);
    flush(state);
  }
  const std::shared_ptr<Connection> connection = state.connection;
  if (state.session.has_left() && connection && !connection->is_closed && !connection->handshake) {
    ::shutdown(connection->socket.get(), SHUT_WR);  // the peer closes once it has read the goodbye
  }
  const bool is_gone = state.session.has_left() && !connection;
  if (state.session.ended() || is_gone) {
    if (peers_.erase(peer) == 0) return;
    if (connection) table_.close(*connection);
    state.connection.reset();
    state.process.end.reset();
    if (state.session.ended()) {
      const End& end = *state.session.ended();
      // Nobody has a caller that never had a link.
      if (state.session.num_links() > 0) {
        hand_over_.push({peer, false, std::nullopt,
                         Down{end.kind, base::concat(state.identity.name, " ", end.text),
                              state.session.take_unacknowledged()}});
      }
    } else {
      state.session.end(DownKind::kLeft, "was left");
    }
    node_.changed.notify_all();
    return;
  }
  if (state.session.wants_link(now)) start_link(peer, now);
  arm(state.session.next_time());
}

void Loop::post_update(const std::shared_ptr<PeerState>& peer) {
  asio::post(io_, [self = weak_from_this(), peer] {
    const auto loop = self.lock();
    if (!loop) return;
    loop->locked([&] {
      peer->wake_is_posted = false;
      peer->session.tick(Time::clock::now());
      loop->flush(*peer);
      loop->update_peer(peer, Time::clock::now());
    });
  });
}

void Loop::update_all_peers() {
  const Time now = Time::clock::now();
  const auto& handshakes = table_.handshakes();
  while (!handshakes.empty() && handshakes.front()->handshake->deadline <= now) {
    const auto late = handshakes.front();
    lose(late, now, "the handshake took too long");
  }
  if (!handshakes.empty()) arm(handshakes.front()->handshake->deadline);
  const std::vector<std::shared_ptr<PeerState>> peers(peers_.begin(), peers_.end());
  for (const auto& peer : peers) update_peer(peer, now);
}

void Loop::arm(Time time) {
  if (time >= armed_) return;
  armed_ = time;
  timer_.expires_at(time);
  timer_.async_wait([this](const asio::error_code& error) {
    if (error) return;  // there is an earlier time
    if (heap_) heap_->collect();
    locked([&] {
      armed_ = Time::max();
      update_all_peers();
    });
  });
}

std::shared_ptr<PeerState> Loop::connect(const std::string& address, base::Deadline deadline) {
  if (is_own_thread()) {
    throw UsageError("net.connect", "a handler cannot wait for a connection", "another thread");
  }
  const SocketAddress resolved = resolve(address);
  std::unique_lock lock(node_.mutex);
  if (node_.is_closing) throw UsageError("net.connect", "this node has been closed");
  const std::shared_ptr<PeerState> peer = make_peer(Role::kCaller);
  PeerState& state = *peer;
  state.address = resolved;
  state.identity.session = new_number();
  post_update(peer);
  const auto is_known = [&] { return state.session.num_links() > 0 || state.session.ended(); };
  base::wait(node_.changed, lock, is_known, deadline);
  if (state.session.num_links() > 0) return peer;
  const std::string why = state.session.ended() ? state.session.ended()->text : state.last_error;
  state.session.end(DownKind::kFailed, why);
  post_update(peer);
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
  throw RendezvousError("net.connect", base::concat("cannot connect to ", address, " within ", waited, " ms",
                                                    why.empty() ? "" : ": ", why));
}

std::vector<std::string> Loop::close(base::Deadline deadline) {
  std::vector<std::string> left;
  {
    std::unique_lock lock(node_.mutex);
    node_.is_closing = true;
    for (const auto& peer : peers_) {
      peer->session.leave();
      post_update(peer);
    }
    base::wait(node_.changed, lock, [&] { return peers_.empty(); }, deadline);
    for (const auto& peer : peers_) left.push_back(peer->identity.name);
  }
  stop();
  return left;
}

void Loop::send(PeerState& state, Message message) {
  copy_to_heap(state, message);
  const std::lock_guard lock(node_.mutex);
  if (state.session.ended()) return;
  ++state.counts.messages_sent;
  state.session.send(std::move(message));
  flush(state);
}

std::string Loop::transport(const PeerState& state) {
  const std::lock_guard lock(node_.mutex);
  const std::shared_ptr<Connection> connection = state.connection;
  if (!connection || !connection->has_frames()) return "nothing";
  if (connection->shared) return "shared memory";
  if (connection->tls) return "TLS";
  return is_local(connection->socket.get()) ? "a local socket" : "TCP";
}

PeerMetrics Loop::metrics(const PeerState& state) {
  const std::lock_guard lock(node_.mutex);
  PeerMetrics metrics = state.counts;
  metrics.bytes_on_the_way = state.session.outbox().bytes_on_the_way();
  metrics.queued = state.session.outbox().num_unsent();
  metrics.bytes_queued = state.session.outbox().bytes_unsent();
  metrics.bytes_by_handle = state.session.outbox().bytes_by_handle();
  return metrics;
}

bool Loop::is_down(const PeerState& state) {
  const std::lock_guard lock(node_.mutex);
  return state.session.ended().has_value();
}

}  // namespace cohort::net::node_detail
