// One thread runs the loop; every thread may send. A thread that sends writes to the socket itself while the
// socket takes bytes; else the loop writes once the socket is writable. What a session gives (messages, an
// end) is queued under the mutex and handed over without it, so a handler may send and close.
//
// asio says when a listener or a process (its pidfd) is ready, and when one of the connections' sockets is:
// ConnectionTable has those, as a thread that reads a socket itself must be able to take it out.
//
// A function of the handler may run on the node's own thread, and turn out to be long. replace_thread() then
// starts another thread in its place. A function may also wait on a thread in poll_until(). will_wait() then
// leaves reading, and handing over, to the node's own thread.
#include "cohort/net/internal/loop/loop.h"

#include <asio/post.hpp>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/lookup_timeout.h"
#include "cohort/net/no_answer.h"
#include "cohort/net/unknown_host.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::chrono::milliseconds kBetweenNames(100);
constexpr std::chrono::seconds kPatience(5);  // for functions of the handler, at the end
constexpr int kTurnsBetweenIo = 16;

std::int64_t milliseconds_of(base::Deadline::Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
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

// Of a caller without a link: whether a process may be at its addresses, as also where nobody could be asked.
// The kernel connects a local socket only where it listens.
bool has_answer(const PeerState& peer) {
  if (!peer.addresses.has_no_answer()) return true;
  const std::shared_ptr<Connection>& connection = peer.connection;
  return connection && connection->handshake &&
         (is_local(connection->socket.get()) || connection->handshake->protocol.is_trusted());
}

// A peer as users have it. It may outlive its node.
class LoopPeer final : public PeerState {
 public:
  LoopPeer(std::weak_ptr<Loop> loop, Role role, const NodeOptions& options, std::function<void()> has_changed)
      : PeerState(role, session_options(options),
                  options.allocate ? options.allocate : Allocate(allocate_aligned), std::move(has_changed)),
        loop_(std::move(loop)) {}

  std::uint64_t send(Message message) override {
    const auto loop = loop_.lock();
    return loop ? loop->send(*this, std::move(message)) : 0;
  }
  bool replace(std::uint64_t message, Message& other) override {
    const auto loop = loop_.lock();
    return loop && loop->replace(*this, message, other);
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
    : core_(std::move(options), std::move(handler)),
      peers_(core_, [this](Role role) { return make_peer(role); }),
      handshakes_(core_, peers_),
      listeners_(core_, peers_),
      polling_(core_, peers_),
      thread_(core_.lock),
      work_(core_.io.get_executor()),
      sockets_(core_.io, core_.table.readiness().release()) {}

void Loop::start() {
  const std::lock_guard lock(core_.lock.mutex);
  wait_for_sockets();
  thread_.start(body());
}

void Loop::stop() {
  const base::Deadline deadline(kPatience);
  std::unique_lock lock(core_.lock.mutex);
  core_.lock.is_closing = core_.lock.is_stopped = true;
  core_.io.stop();
  thread_.stop(lock, deadline);
  core_.table.close_handshakes();
  peers_.stop();
  listeners_.stop();
  core_.active.clear();
  core_.lock.changed.notify_all();
  if (core_.hand_over.is_idle()) core_.hand_over.run(lock);  // what was left to the loop
  const auto is_quiet = [&] {
    const bool has_no_turn =
        core_.hand_over.is_idle() || core_.hand_over.is_turn_of(std::this_thread::get_id());
    return thread_.num_replaced_elsewhere() <= 0 && has_no_turn;
  };
  base::wait(core_.lock.changed, lock, is_quiet, deadline);
}

std::shared_ptr<Peer> Loop::connect(const std::string& address, base::Deadline deadline,
                                    bool gives_up_if_rejected) {
  if (is_own_thread()) {
    throw UsageError("net.connect", "a handler cannot wait for a connection", "another thread");
  }
  std::vector<SocketAddress> addresses = resolve_by(address, deadline, gives_up_if_rejected);
  std::unique_lock lock(core_.lock.mutex);
  if (core_.lock.is_closing) throw UsageError("net.connect", "this node has been closed");
  const std::shared_ptr<PeerState> peer = peers_.add(Role::kCaller);
  PeerState& state = *peer;
  state.addresses = AddressList(std::move(addresses));
  state.gives_up = gives_up_if_rejected;
  state.identity.session = new_number();
  state.wake();
  const auto is_known = [&] {
    return state.session.num_links() > 0 || state.session.ended() ||
           (gives_up_if_rejected && state.addresses.is_rejected());
  };
  base::wait(core_.lock.changed, lock, is_known, deadline);
  if (state.session.num_links() > 0) return peer;
  // Before the first link kDied means that the process is leaving. A process that rejects the handshake runs.
  const auto& end = state.session.ended();
  const bool is_gone =
      gives_up_if_rejected && (end ? end->kind == DownKind::kDied : state.addresses.is_rejected());
  const bool is_silent = !end && !has_answer(state);
  const std::string why = end ? end->text : state.last_error;
  state.session.end(DownKind::kFailed, why);
  state.wake();
  if (is_gone) return nullptr;
  const std::string text =
      base::concat("cannot connect to ", address, " within ", milliseconds_of(deadline.elapsed()), " ms",
                   why.empty() ? "" : ": ", why);
  if (is_silent) throw NoAnswer("net.connect", text);
  throw RendezvousError("net.connect", text);
}

// A name may be known later than its process is expected: DNS of a cluster has it once the container runs. A
// name server that fails has not said that the name is unknown, so who gives up asks again too.
std::vector<SocketAddress> Loop::resolve_by(const std::string& address, base::Deadline deadline,
                                            bool gives_up) {
  const auto pause = [&] {
    return base::Deadline(std::min<base::Deadline::Clock::duration>(kBetweenNames, deadline.remaining()));
  };
  std::exception_ptr failure;  // of the lookup before
  while (true) {
    try {
      auto found = begin_to_resolve(address);
      while (!found.wait(pause())) {
        check_open();
        if (!deadline.expired()) continue;
        if (failure) std::rethrow_exception(failure);
        throw LookupTimeout("net.connect", base::concat("cannot connect to ", address, " within ",
                                                        milliseconds_of(deadline.elapsed()),
                                                        " ms: no name server has said where its host is"));
      }
      return found.get(deadline);
    } catch (const UnknownHost&) {
      if (gives_up || deadline.expired()) throw;
      failure = std::current_exception();
    } catch (const RendezvousError&) {
      if (deadline.expired()) throw;
      failure = std::current_exception();
    }
    {
      std::unique_lock lock(core_.lock.mutex);
      base::wait(core_.lock.changed, lock, [&] { return core_.lock.is_closing; }, pause());
    }
    check_open();
  }
}

void Loop::check_open() {
  const std::lock_guard lock(core_.lock.mutex);
  if (core_.lock.is_closing) throw UsageError("net.connect", "this node has been closed");
}

std::vector<std::string> Loop::close(base::Deadline deadline) {
  std::vector<std::string> left;
  {
    std::unique_lock lock(core_.lock.mutex);
    core_.lock.is_closing = true;
    for (const auto& peer : peers_.all()) {
      // A thread waits in connect() for such a peer, and nobody has it yet.
      const bool is_in_connect = peer->role == Role::kCaller && peer->session.num_links() == 0;
      if (is_in_connect) {
        peer->session.end(DownKind::kFailed, "this node has been closed");
      } else {
        peer->session.leave();
      }
      peer->wake();
    }
    base::wait(core_.lock.changed, lock, [&] { return peers_.all().empty(); }, deadline);
    for (const auto& peer : peers_.all()) left.push_back(peer->identity.name);
  }
  stop();
  return left;
}

std::shared_ptr<std::byte> Loop::allocate_shared(std::size_t num_bytes) {
  if (core_.heap) {
    if (auto block = core_.heap->allocate(num_bytes)) return block;
  }
  return core_.options.allocate ? core_.options.allocate(num_bytes) : allocate_aligned(num_bytes);
}

SharedMetrics Loop::shared_metrics() const {
  return core_.heap ? SharedMetrics{core_.heap->bytes_in_use(), core_.heap->bytes_cached()} : SharedMetrics();
}

// Where no thread can be had, the function holds the others up.
void Loop::replace_thread() {
  const std::lock_guard lock(core_.lock.mutex);
  if (core_.lock.is_stopped || !core_.hand_over.is_turn_of(thread_.id())) return;
  if (thread_.replace(body())) core_.hand_over.take_turn_away();
}

void Loop::will_wait() {
  polling_.leave();
  if (is_own_thread()) return replace_thread();
  const std::lock_guard lock(core_.lock.mutex);
  core_.hand_over.leave_turn();
}

std::uint64_t Loop::send(PeerState& peer, Message message) {
  copy_to_heap(peer, message);
  const std::lock_guard lock(core_.lock.mutex);
  if (peer.session.ended()) return 0;
  ++peer.counts.messages_sent;
  const std::uint64_t number = peer.session.send(std::move(message));
  core_.frames.flush(peer);
  return peer.session.outbox().num_queued() == 0 ? 0 : number;
}

// A shorter message may have room where the one before had none.
bool Loop::replace(PeerState& peer, std::uint64_t message, Message& other) {
  const std::lock_guard lock(core_.lock.mutex);
  if (!peer.session.replace(message, other)) return false;
  core_.frames.flush(peer);
  return true;
}

// Without the mutex, for what is copied may be long.
void Loop::copy_to_heap(const PeerState& peer, Message& message) {
  if (!core_.heap || message.num_bytes() < kLeastBytesByHandle) return;
  std::shared_ptr<const Handles> handles;
  {
    const std::lock_guard lock(core_.lock.mutex);
    handles = peer.session.handles();
  }
  if (handles) handles->copy_to_heap(message);
}

std::string Loop::transport(const PeerState& peer) {
  const std::lock_guard lock(core_.lock.mutex);
  const std::shared_ptr<Connection> connection = peer.connection;
  if (!connection || !connection->has_frames()) return "nothing";
  if (connection->shared) return "shared memory";
  if (connection->tls) return "TLS";
  return is_local(connection->socket.get()) ? "a local socket" : "TCP";
}

PeerMetrics Loop::metrics(const PeerState& peer) {
  const std::lock_guard lock(core_.lock.mutex);
  const Outbox& outbox = peer.session.outbox();
  PeerMetrics metrics = peer.counts;
  metrics.bytes_on_the_way = outbox.bytes_on_the_way();
  metrics.queued = outbox.num_unsent();
  metrics.bytes_queued = outbox.bytes_unsent();
  metrics.bytes_by_handle = outbox.bytes_by_handle();
  return metrics;
}

bool Loop::is_down(const PeerState& peer) {
  const std::lock_guard lock(core_.lock.mutex);
  return peer.session.ended().has_value();
}

std::shared_ptr<PeerState> Loop::make_peer(Role role) {
  // The session calls it when somebody drops a message: with any mutex, also after the node's end.
  const auto later = std::make_shared<std::weak_ptr<PeerState>>();
  auto peer =
      std::make_shared<LoopPeer>(weak_from_this(), role, core_.options, [self = weak_from_this(), later] {
        const auto loop = self.lock();
        const auto peer = later->lock();
        if (loop && peer) loop->update_soon(peer);
      });
  *later = peer;
  return peer;
}

// On any thread, with any mutex.
void Loop::update_soon(const std::shared_ptr<PeerState>& peer) {
  if (peer->wake_is_posted.exchange(true)) return;
  asio::post(core_.io, [this, peer] {
    core_.hand_over.locked([&] {
      peer->wake_is_posted = false;
      peer->session.tick(Time::clock::now());
      peers_.flush_and_update(peer, Time::clock::now());
    });
  });
}

NodeThread::Body Loop::body() {
  return [self = shared_from_this()](int generation) { self->run(generation); };
}

void Loop::run(int generation) {
  Time end{};  // of polling
  core_.hand_over.locked([] {});
  for (unsigned turn = 0; thread_.is_current(generation) && !core_.io.stopped(); ++turn) {
    bool has_moved = false, may_poll = false;
    core_.hand_over.locked([&] {
      has_moved = poll_active();
      may_poll = core_.active.may_poll();
    });
    if (has_moved) {
      end = Time::clock::now() + core_.options.spin;
    } else if (!may_poll || Time::clock::now() >= end) {
      if (let_all_sleep()) core_.io.run_one();
      end = Time::clock::now() + core_.options.spin;
    } else {
      std::this_thread::yield();
    }
    if (turn % kTurnsBetweenIo != 0) continue;
    while (thread_.is_current(generation) && core_.io.poll_one() > 0) {
    }
  }
}

// Under the mutex. Whether something has come.
bool Loop::poll_active() {
  bool has_moved = false;
  for (const auto& ring : core_.active.rings()) has_moved = peers_.poll(ring) || has_moved;
  if (core_.active.polls_sockets()) has_moved = poll_sockets() || has_moved;
  return has_moved;
}

bool Loop::let_all_sleep() {
  const std::lock_guard lock(core_.lock.mutex);
  return core_.active.let_all_sleep();
}

// Under the mutex.
void Loop::wait_for_sockets() {
  sockets_.async_wait(asio::posix::stream_descriptor::wait_read, [this](const asio::error_code& error) {
    if (error) return;
    core_.hand_over.locked([this] {
      poll_sockets();
      wait_for_sockets();  // before messages are handed over: a function of the handler may keep this thread
    });
  });
}

// Under the mutex. Reads and writes one socket that is ready: others wait for the mutex, and what has come is
// handed over without it. False where none is.
bool Loop::poll_sockets() {
  const ConnectionTable::Ready ready = core_.table.next_ready();
  const std::shared_ptr<Connection>& connection = ready.connection;
  if (!connection) return false;
  if (ready.is_writable && connection->interest.writes) {
    connection->handshake ? handshakes_.on_writable(connection) : peers_.on_writable(connection);
  }
  if (ready.is_readable && !connection->is_closed && !connection->is_connecting()) {
    connection->handshake ? handshakes_.on_readable(connection) : peers_.on_readable(connection);
  }
  return true;
}

}  // namespace cohort::net::node_detail
