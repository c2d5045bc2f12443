// TLS of a node's connections, and how a listener rejects who connects. What a socket is read and written by is in
// loop_links.cpp and loop.cpp.
//
// Who is rejected is told why: by an alert of TLS, or by bytes that a caller with TLS knows for none. A socket that is closed
// with unread bytes in it resets the connection, and the other side may lose what it was told. So the listener closes one
// direction, and drops what still comes until the other side closes too, or the handshake's deadline.
#include <sys/socket.h>

#include <cerrno>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/net/internal/loop.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::chrono::seconds kBetweenWarnings(1);
constexpr std::size_t kMaxDroppedBytes = 64 * 1024;

}  // namespace

// Continues the TLS handshake. Returns whether it is done.
bool Loop::has_tls(const std::shared_ptr<Connection>& connection, Time now) {
  TlsStream& tls = *connection->tls;
  if (tls.is_ready()) return true;
  try {
    switch (tls.handshake()) {
      case TlsStatus::kReady:
        connection->handshake->protocol.bind_to(tls.channel_binding());
        return true;
      case TlsStatus::kWaits:
        connection->waits_to_write = tls.wants_to_write();
        table_.update_interest(*connection);
        return false;
      case TlsStatus::kLost:
        lose(connection, now, tls.error());
        return false;
    }
  } catch (const CommError& error) {
    fail_handshake(connection, now, error);
  }
  return false;
}

// Another connection would fail in the same way: a caller's session ends, and who connected is rejected.
void Loop::fail_handshake(const std::shared_ptr<Connection>& connection, Time now, const CommError& error) {
  const std::string text = base::message_of(error);
  if (connection->peer) {
    Session& session = connection->peer->session;
    const bool was_up = session.num_links() > 0;
    session.end(was_up ? DownKind::kDied : DownKind::kFailed, (was_up ? "died: " : "") + text);
    return lose(connection, now, text);
  }
  const int socket = connection->socket.get();
  if (now >= next_warning_) {
    base::log_warning(base::concat("a connection from ", peer_address(socket), " was rejected: ", text));
    next_warning_ = now + kBetweenWarnings;
  }
  const std::string answer = connection->handshake->protocol.take_output();
  if (!connection->tls && answer.empty()) return lose(connection, now, text);
  if (!connection->tls)
    static_cast<void>(::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  ::shutdown(socket, SHUT_WR);
  connection->tls.reset();
  connection->handshake->is_rejected = true;
}

void Loop::drop_input(const std::shared_ptr<Connection>& connection, Time now) {
  const ssize_t size = ::recv(connection->socket.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size > 0) connection->handshake->num_dropped += static_cast<std::size_t>(size);
  if (size <= 0 || connection->handshake->num_dropped > kMaxDroppedBytes)
    lose(connection, now, "it was rejected");
}

}  // namespace cohort::net::node_detail
