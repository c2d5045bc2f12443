// Input feeds the protocol (handshake.h), which says what to send and when it is done; here are the socket,
// TLS below it, and the descriptors that go with a hello. The peer of a listener's connection is looked up
// only when the caller's proof is right. What was read beyond the handshake are frames, and goes to
// FrameIo.
#include "cohort/net/internal/loop/handshakes.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/net/internal/loop/hello_exchange.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kReadBytes = 1024;  // of a socket without TLS

}  // namespace

void Handshakes::on_readable(const std::shared_ptr<Connection>& connection) {
  const Time now = Time::clock::now();
  read(connection, now);
  if (connection->peer && !connection->handshake) peers_.flush_and_update(connection->peer, now);
}

void Handshakes::on_writable(const std::shared_ptr<Connection>& connection) {
  connection->waits_to_write = false;
  if (connection->is_connecting()) {
    connection->handshake->is_connecting = false;
    const int socket = connection->socket.get();
    int error = connect_error(socket);
    if (error == 0 && is_connected_to_itself(socket)) error = ECONNREFUSED;
    if (error != 0) return peers_.lose(connection, Time::clock::now(), std::strerror(error), error);
    if (!is_of_own_user(socket)) return leave_to_other_user(connection);  // before it is shown any memory
  }
  core_.table.update_interest(*connection);
  write(connection);
  finish_if_done(connection, Time::clock::now());
  if (!connection->handshake) {
    if (connection->peer) peers_.flush_and_update(connection->peer, Time::clock::now());
    return;
  }
  // What OpenSSL has read already makes no socket readable.
  if (connection->tls && connection->handshake && !connection->is_closed) on_readable(connection);
}

// Another user has the name of a peer that has ended. Before the first link it may be the job that has two
// users.
void Handshakes::leave_to_other_user(const std::shared_ptr<Connection>& connection) {
  const std::string why = "a process of another user listens there";
  Session& session = connection->peer->session;
  if (session.num_links() == 0) session.end(DownKind::kFailed, why);
  peers_.lose(connection, Time::clock::now(), why, session.num_links() == 0 ? 0 : ECONNREFUSED);
}

void Handshakes::read(const std::shared_ptr<Connection>& connection, Time now) {
  if (connection->handshake->is_rejected) return rejections_.drop_input(connection, now);
  if (connection->tls) write(connection);  // what waited for the TLS handshake
  if (connection->is_closed || connection->handshake->is_rejected) return;
  if (connection->tls && !connection->tls->is_ready()) return;
  const std::span<std::byte> buffer = core_.frames.buffer();
  const iovec room{buffer.data(), TlsStream::kMinReadBytes};
  const ssize_t size = connection->tls
                           ? connection->tls->read({&room, 1})
                           : receive_with_descriptors(connection->socket.get(), buffer.first(kReadBytes),
                                                      connection->handshake->descriptors_that_came);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0 && !(size < 0 && errno == EPROTO && connection->tls)) {
    return peers_.lose(connection, now,
                       size == 0 ? "the connection was closed during the handshake" : std::strerror(errno));
  }
  Handshake& protocol = connection->handshake->protocol;
  try {
    if (size < 0) throw connection->tls->failure();
    protocol.feed({reinterpret_cast<const char*>(buffer.data()), static_cast<std::size_t>(size)});
    if (protocol.is_time_for_hello() && !answer_hello(connection)) return;
  } catch (const CommError& error) {
    return rejections_.fail(connection, now, error);
  }
  write(connection);
  finish_if_done(connection, now);
}

// Once its last bytes are written.
void Handshakes::finish_if_done(const std::shared_ptr<Connection>& connection, Time now) {
  if (connection->is_closed || !connection->handshake) return;
  const PendingHandshake& handshake = *connection->handshake;
  if (handshake.protocol.is_done() && handshake.output.empty()) finish(connection, now);
}

void Handshakes::write(const std::shared_ptr<Connection>& connection) {
  if (connection->tls && !has_tls(connection, Time::clock::now())) return;
  PendingHandshake& handshake = *connection->handshake;
  handshake.output += handshake.protocol.take_output();
  while (!handshake.output.empty()) {
    std::vector<int> descriptors;
    if (handshake.memory_to_send.is_open()) descriptors.push_back(handshake.memory_to_send.get());
    if (const int heap = handshake.shows_heap ? core_.heap->descriptor() : -1; heap >= 0)
      descriptors.push_back(heap);
    const iovec bytes{handshake.output.data(), handshake.output.size()};
    const ssize_t size = connection->tls
                             ? connection->tls->write({&bytes, 1})
                             : send_with_descriptors(connection->socket.get(), handshake.output, descriptors);
    if (size < 0 && errno == EINTR) continue;
    if (size == 0) return;  // TLS has to read first
    if (size < 0 && errno == EAGAIN) return core_.table.wait_to_write(*connection);
    if (size < 0) return peers_.lose(connection, Time::clock::now(), std::strerror(errno));
    handshake.memory_to_send.close();
    handshake.shows_heap = false;
    handshake.output.erase(0, static_cast<std::size_t>(size));
  }
}

// Continues the TLS handshake. Returns whether it is done.
bool Handshakes::has_tls(const std::shared_ptr<Connection>& connection, Time now) {
  TlsStream& tls = *connection->tls;
  if (tls.is_ready()) return true;
  try {
    switch (tls.handshake()) {
      case TlsStatus::kReady:
        connection->handshake->protocol.bind_to(tls.channel_binding());
        return true;
      case TlsStatus::kWaits:
        connection->waits_to_write = tls.wants_to_write();
        core_.table.update_interest(*connection);
        return false;
      case TlsStatus::kLost:
        peers_.lose(connection, now, tls.error());
        return false;
    }
  } catch (const CommError& error) {
    rejections_.fail(connection, now, error);
  }
  return false;
}

// A caller says who it is. A listener finds, or makes, the peer of the session that the caller names. False
// where the connection is of no use.
bool Handshakes::answer_hello(const std::shared_ptr<Connection>& connection) {
  Handshake& protocol = connection->handshake->protocol;
  if (!connection->peer) connection->peer = peer_of_caller(protocol.peer());
  if (connection->peer) {
    protocol.set_hello(own_hello(core_, *connection));
    return true;
  }
  protocol.set_hello(hello_without_session(core_));
  write(connection);
  peers_.lose(connection, Time::clock::now(), "the session is not known");
  return false;
}

std::shared_ptr<PeerState> Handshakes::peer_of_caller(const Hello& hello) {
  std::shared_ptr<PeerState> peer = peers_.find_caller(hello.session, hello.incarnation);
  if (!peer && hello.links == 0 && !core_.lock.is_closing) {
    peer = peers_.add(Role::kListener);
    peer->identity = {hello.name, hello.incarnation, hello.session};
  }
  return peer;
}

// A caller has heard who is at the other end. Ends the session where that is not whom it was with.
void Handshakes::check_listener(PeerState& peer, const Hello& hello) const {
  if (peer.identity.incarnation.empty()) {
    peer.identity.name = hello.name;
    peer.identity.incarnation = hello.incarnation;
  }
  if (peer.identity.incarnation != hello.incarnation) {
    peer.session.end(DownKind::kDied, "died: another process has taken its place");
  } else if (hello.session == 0) {
    // It lives. A process that was stopped for long comes back to peers that have not heard it.
    const bool is_leaving = peer.session.num_links() == 0;
    peer.session.end(is_leaving ? DownKind::kDied : DownKind::kSilent,
                     is_leaving ? "is leaving" : "has given this process up");
  }
}

void Handshakes::finish(const std::shared_ptr<Connection>& connection, Time now) {
  const std::shared_ptr<PeerState> peer = connection->peer;
  PeerState& state = *peer;
  const Hello hello = connection->handshake->protocol.peer();
  const bool is_leaving = state.role == Role::kCaller && hello.session == 0 && state.session.num_links() == 0;
  if (is_leaving && !state.gives_up) {  // the next process there is waited for
    return peers_.lose(connection, now, base::concat(hello.name, " is leaving"));
  }
  const std::string rest = connection->handshake->protocol.take_rest();
  core_.table.end_handshake(*connection);
  if (state.role == Role::kCaller) {
    check_listener(state, hello);
  } else if (state.connection && state.connection != connection) {
    core_.table.close(*state.connection);  // it is broken, and this side has not seen it
    state.session.link_down(now);
  }
  if (!hello.has_shared_link) connection->shared.reset();
  const std::shared_ptr<const Handles> handles = handles_for(core_, *connection, hello);
  connection->handshake.reset();
  core_.table.update_interest(*connection);
  if (state.session.ended()) {
    core_.table.close(*connection);
    if (state.connection == connection) state.connection.reset();
    return peers_.update(peer, now);
  }
  state.connection = connection;
  if (state.session.num_links() == 0) state.session.limit_window(hello.window);
  state.session.link_up(hello.received, now, handles);
  state.addresses.note_link();
  ++state.counts.links;
  if (state.role == Role::kListener && state.session.num_links() == 1) {
    core_.hand_over.push({peer, true, std::nullopt, std::nullopt});
  }
  peers_.watch_process(peer, hello);
  peers_.watch_listener(peer, hello);
  if (connection->shared) {
    core_.active.keep(connection);
  } else if (!rest.empty()) {
    core_.frames.take_frames(*connection, std::as_bytes(std::span(rest)), now);
  }
  core_.lock.changed.notify_all();
}

}  // namespace cohort::net::node_detail
