// Who is rejected is told why: by an alert of TLS, or by bytes that a caller with TLS knows for none. A
// socket that is closed with unread bytes in it resets the connection, and the other side may lose what it
// was told. So the listener closes one direction, and drops what still comes until the other side closes too,
// or the handshake's deadline.
#include "cohort/net/internal/loop/rejections.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::chrono::seconds kBetweenWarnings(1);
constexpr std::size_t kMaxDroppedBytes = 64 * 1024;

}  // namespace

void Rejections::fail(const std::shared_ptr<Connection>& connection, Time now, const CommError& error) {
  const std::string text = base::message_of(error);
  if (connection->peer) {
    Session& session = connection->peer->session;
    // Who has another secret or version is another process. One whose certificate has expired, or ours, may
    // live.
    const bool may_live = connection->tls && !connection->tls->error().empty();
    if (session.num_links() == 0) {
      session.end(DownKind::kFailed, text);
    } else if (may_live) {
      session.end(DownKind::kSilent, "cannot be connected to any more: " + text);
    } else {
      session.end(DownKind::kDied, "died: " + text);
    }
    return peers_.lose(connection, now, text);
  }
  const int socket = connection->socket.get();
  warn(socket, text, now);
  const std::string answer = connection->handshake->protocol.take_output();
  if (!connection->tls && answer.empty()) return peers_.lose(connection, now, text);
  if (!connection->tls) {
    static_cast<void>(::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  } else if (!answer.empty() && connection->tls->is_ready()) {
    const iovec bytes{const_cast<char*>(answer.data()), answer.size()};
    static_cast<void>(connection->tls->write({&bytes, 1}));
  }
  ::shutdown(socket, SHUT_WR);
  connection->tls.reset();
  connection->handshake->is_rejected = true;
}

void Rejections::warn(int socket, const std::string& text, Time now) {
  if (now < next_warning_) return;
  base::log_warning(base::concat("a connection from ", peer_address(socket), " was rejected: ", text));
  next_warning_ = now + kBetweenWarnings;
}

void Rejections::drop_input(const std::shared_ptr<Connection>& connection, Time now) {
  const std::span<std::byte> room = core_.frames.buffer();
  const ssize_t size = ::recv(connection->socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  std::size_t& num_dropped = connection->handshake->num_dropped;
  if (size > 0) num_dropped += static_cast<std::size_t>(size);
  if (size <= 0 || num_dropped > kMaxDroppedBytes) peers_.lose(connection, now, "it was rejected");
}

}  // namespace cohort::net::node_detail
