// A process that ends is seen twice: its socket ends, and its pidfd becomes readable. The rest of the socket
// is read first, so nothing that it sent is lost.
//
// update() is called after all that may change a session: bytes, a lost connection, the timer, a thread that
// gave a message's credit back. It looks at the state alone, so nobody has to know which of these it was. It
// may call itself by way of start_link() and lose(). That ends, as a session does not want another link
// before a pause.
#include "cohort/net/internal/loop/peers.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/process.h"
#include "cohort/base/secret.h"
#include "cohort/net/internal/loop/hello_exchange.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {

Peers::Peers(LoopCore& core, Make make)
    : core_(core),
      make_(std::move(make)),
      probes_(core,
              [this](const std::shared_ptr<PeerState>& peer) {
                peer->session.end(DownKind::kDied, "died: nobody listens at its address any more");
                update(peer, Time::clock::now());
              }),
      timer_(core.io) {}

std::shared_ptr<PeerState> Peers::add(Role role) {
  return *peers_.insert(make_(role)).first;
}

std::shared_ptr<PeerState> Peers::find_caller(std::uint64_t session, const std::string& incarnation) const {
  for (const auto& peer : peers_) {
    if (peer->role == Role::kListener && peer->identity.session == session &&
        peer->identity.incarnation == incarnation && !peer->session.ended()) {
      return peer;
    }
  }
  return nullptr;
}

void Peers::stop() {
  for (const auto& peer : peers_) {
    if (peer->connection) core_.table.close(*peer->connection);
    peer->connection.reset();  // each holds the other
    peer->process.end.reset();
    peer->listener.probe.reset();
    peer->session.end(DownKind::kLeft, "was left");
  }
  peers_.clear();
}

std::shared_ptr<Connection> Peers::add_connection(base::Fd fd, Role role, std::shared_ptr<PeerState> peer,
                                                  Time now) {
  auto connection = std::make_shared<Connection>(std::move(fd));
  const int socket = connection->socket.get();
  connection->peer = std::move(peer);
  connection->handshake.emplace(Handshake(role, core_.options.secret, base::random_word()), role,
                                now + core_.options.handshake);
  if (core_.tls && !is_local(socket)) connection->tls = std::make_unique<TlsStream>(*core_.tls, socket, role);
  core_.table.add(connection);
  arm(connection->handshake->deadline);
  return connection;
}

void Peers::start_link(const std::shared_ptr<PeerState>& peer, Time now) {
  PeerState& state = *peer;
  if (state.connection) return;
  state.session.start_link();
  try {
    base::Fd fd = start_connect(state.addresses.current());
    if (!fd.is_open()) {
      const int error = errno;
      state.last_error = std::strerror(error);
      state.addresses.note_failure(outcome_of(error, state.addresses.current()));
      core_.lock.changed.notify_all();
      return state.session.connect_failed(state.addresses.is_rejected() && !state.process.end, now);
    }
    state.connection = add_connection(std::move(fd), Role::kCaller, peer, now);
  } catch (const SystemError& error) {
    state.last_error = base::message_of(error);
    state.addresses.note_failure(Outcome::kOther);
    state.session.connect_failed(false, now);
  }
}

void Peers::lose(const std::shared_ptr<Connection>& connection, Time now, const std::string& error,
                 int connect_error) {
  core_.table.close(*connection);
  if (!connection->peer) return;
  const std::shared_ptr<PeerState> peer = connection->peer;
  PeerState& state = *peer;
  if (state.connection != connection) return;
  state.connection.reset();
  state.last_error = error;
  if (!connection->handshake) {
    state.session.link_down(now);
    if (!state.session.ended()) probes_.link_down(peer);
  } else if (state.role == Role::kCaller) {
    state.addresses.note_failure(outcome_of(connect_error, state.addresses.current()));
    core_.lock.changed.notify_all();
    state.session.connect_failed(state.addresses.is_rejected() && !state.process.end, now);
  }
  update(peer, now);
}

void Peers::on_readable(const std::shared_ptr<Connection>& connection) {
  const Time now = Time::clock::now();
  if (connection->shared) {
    const std::optional<std::string> error = core_.frames.read_wakeups(*connection, now);
    error ? lose(connection, now, *error) : core_.active.keep(connection);
  } else {
    if (core_.options.spin.count() > 0) core_.active.keep_sockets();
    read(connection, now);
  }
  flush_and_update(connection->peer, now);
}

void Peers::on_writable(const std::shared_ptr<Connection>& connection) {
  connection->waits_to_write = false;
  core_.table.update_interest(*connection);
  flush_and_update(connection->peer, Time::clock::now());
}

bool Peers::poll(const std::shared_ptr<Connection>& connection) {
  if (connection->is_closed) return false;
  if (connection->shared) {
    const bool has_room = connection->waits_to_write && connection->shared->writer().has_room();
    if (!has_room && !connection->shared->reader().has_bytes()) return false;
    if (has_room) connection->waits_to_write = false;
  }
  const std::shared_ptr<PeerState> peer = connection->peer;
  const Time now = Time::clock::now();
  const bool may_have_more = read(connection, now);
  // An end is handed over too: nobody else is told of it.
  if (!connection->shared && !may_have_more && !peer->session.ended() && !connection->is_closed) return false;
  flush_and_update(peer, now);
  return true;
}

// Whether to read again. Of a ring: whether it had something.
bool Peers::read(const std::shared_ptr<Connection>& connection, Time now) {
  if (connection->shared) return core_.frames.read_ring(*connection, now);
  const ReadResult result = core_.frames.read_socket(*connection, now);
  if (result.error) lose(connection, now, *result.error);
  return result.may_have_more;
}

void Peers::flush_and_update(const std::shared_ptr<PeerState>& peer, Time now) {
  core_.frames.flush(*peer);
  update(peer, now);
}

void Peers::update(const std::shared_ptr<PeerState>& peer, Time now) {
  PeerState& state = *peer;
  const bool is_time = now >= state.session.next_time();
  if (is_time && state.session.is_up() && state.connection && state.connection->num_pollers > 0) {
    // A thread in poll_until() that is in a function of the handler reads nothing, and nobody else is told
    // that something has come. Such a peer is not silent.
    read(std::shared_ptr(state.connection), now);
  }
  if (is_time) {
    state.session.tick(now);
    core_.frames.flush(state);
  }
  if (state.session.has_left() && state.connection && state.connection->has_frames()) {
    ::shutdown(state.connection->socket.get(), SHUT_WR);  // the peer closes once it has read the goodbye
  }
  const bool is_gone = state.session.has_left() && !state.connection;
  if (state.session.ended() || is_gone) return remove(peer);
  if (state.session.wants_link(now)) start_link(peer, now);
  arm(state.session.next_time());
}

// Takes the peer out, and tells the handler of an end that it is to know.
void Peers::remove(const std::shared_ptr<PeerState>& peer) {
  PeerState& state = *peer;
  if (peers_.erase(peer) == 0) return;
  const std::shared_ptr<Connection> connection = std::exchange(state.connection, nullptr);
  if (connection) core_.table.close(*connection);
  state.process.end.reset();
  state.listener.probe.reset();
  if (!state.session.ended()) {
    state.session.end(DownKind::kLeft, "was left");
  } else if (state.session.num_links() > 0) {  // nobody has a caller that never had a link
    const End& end = *state.session.ended();
    core_.hand_over.push({peer, false, std::nullopt,
                          Down{end.kind, base::concat(state.identity.name, " ", end.text),
                               state.session.take_unacknowledged()}});
  }
  core_.lock.changed.notify_all();
}

void Peers::watch_process(const std::shared_ptr<PeerState>& peer, const Hello& hello) {
  PeerState& state = *peer;
  if (state.process.end || hello.place != core_.self.place || hello.process == ::getpid()) return;
  if (state.connection && !may_be_of(hello, *state.connection)) return;
  base::Fd fd = base::open_process(static_cast<pid_t>(hello.process));
  // Its number may be another process's by now: asked after the descriptor is there.
  const std::string began = base::process_start(std::to_string(hello.process));
  // It is there, but no descriptor is left to read when it began: then only its silence is seen.
  if (began.empty() && (::kill(static_cast<pid_t>(hello.process), 0) == 0 || errno == EPERM)) return;
  const auto on_end = [this, peer, process = hello.process] {
    core_.hand_over.locked([&] { on_process_end(peer, process); });
  };
  if (began != hello.began) return asio::post(core_.io, on_end);
  if (!fd.is_open()) return;  // the kernel cannot watch it
  const auto descriptor = std::make_shared<asio::posix::stream_descriptor>(core_.io, fd.release());
  descriptor->async_wait(asio::posix::stream_descriptor::wait_read, [on_end](const asio::error_code& error) {
    if (!error) on_end();
  });
  state.process.end = descriptor;
}

void Peers::on_process_end(const std::shared_ptr<PeerState>& peer, std::int64_t process) {
  const Time now = Time::clock::now();
  const std::shared_ptr<Connection> connection = peer->connection;
  const auto has_more = [&] {
    return connection && connection->has_frames() && !peer->session.ended() && read(connection, now);
  };
  // A ring is read once, which is all that it has.
  while (has_more() && !connection->shared) {
  }
  peer->session.end(DownKind::kDied, base::concat("died (process ", process, ")"));
  update(peer, now);
}

void Peers::on_time() {
  const Time now = Time::clock::now();
  const auto& handshakes = core_.table.handshakes();
  while (!handshakes.empty() && handshakes.front()->handshake->deadline <= now) {
    // Who has proved its identity runs.
    const int error = handshakes.front()->handshake->protocol.is_trusted() ? 0 : ETIMEDOUT;
    lose(std::shared_ptr(handshakes.front()), now, "the handshake took too long", error);
  }
  if (!handshakes.empty()) arm(handshakes.front()->handshake->deadline);
  const std::vector<std::shared_ptr<PeerState>> peers(peers_.begin(), peers_.end());
  for (const auto& peer : peers) update(peer, now);
}

void Peers::arm(Time time) {
  if (time >= armed_) return;
  armed_ = time;
  timer_.expires_at(time);
  timer_.async_wait([this](const asio::error_code& error) {
    if (error) return;  // there is an earlier time
    if (core_.heap) core_.heap->collect();
    core_.hand_over.locked([&] {
      armed_ = Time::max();
      on_time();
    });
  });
}

}  // namespace cohort::net::node_detail
