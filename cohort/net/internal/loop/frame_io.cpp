// A message of several megabytes takes longer to copy than another thread may wait for the mutex. As long as
// the other side reads, more of such a message can be written. So flush() ends after a part of it (256 KiB of
// a socket, 4 MiB of a ring), and the node's own thread writes the next part. Reading has limits too: one
// system call of a socket, one length of a ring.
//
// A peer sends a wake-up, a byte over the socket, only where nobody polls its ring (ActiveLinks).
#include "cohort/net/internal/loop/frame_io.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kBufferBytes = 256 * 1024;
// In turn, under the mutex.
constexpr std::size_t kSocketFlushBytes = 256 * 1024, kRingFlushBytes = 4 * 1024 * 1024;
constexpr std::size_t kMaxParts = 1024;           // of a system call (IOV_MAX)
constexpr std::size_t kConsumeBytes = 32 * 1024;  // after so many the writer may use the room again
constexpr int kConsumesInTurn = 32;               // of one ring, before others have theirs
static_assert(kConsumesInTurn >= kRingBytes / kConsumeBytes + 2, "one turn reads all that a ring has");
constexpr int kReadsOfWakeups = 8;  // of one socket, in turn

void send_wakeup(Connection& connection) {
  const char byte = 0;
  // A socket that takes none has wake-ups that are not read yet. Other errors are read by the loop.
  static_cast<void>(::send(connection.socket.get(), &byte, sizeof byte, MSG_NOSIGNAL | MSG_DONTWAIT));
}

}  // namespace

FrameIo::FrameIo(ConnectionTable& table, HandOver& hand_over)
    : table_(table), hand_over_(hand_over), buffer_(kBufferBytes) {}

ReadResult FrameIo::read_socket(Connection& connection, Time now) {
  PeerState& state = *connection.peer;
  const std::span<std::byte> target = state.session.target();
  // One system call fills what is left of a long payload in place, and reads the frames after it.
  const iovec parts[] = {{target.data(), target.size()}, {buffer_.data(), buffer_.size()}};
  const std::size_t first = target.empty() ? 1 : 0;
  const ssize_t got = connection.tls
                          ? connection.tls->read(std::span(parts).subspan(first))
                          : ::readv(connection.socket.get(), parts + first, static_cast<int>(2 - first));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return {errno == EINTR, std::nullopt};
  if (got == 0) return {false, "the connection was closed"};
  if (got < 0) return {false, connection.tls ? connection.tls->error() : std::strerror(errno)};
  const auto size = static_cast<std::size_t>(got);
  state.counts.bytes_received += size;
  std::vector<Message> messages;
  const std::size_t in_place = std::min(size, target.size());
  if (in_place > 0) state.session.filled(in_place, now, messages);
  if (size > in_place) state.session.consume(std::span(buffer_).first(size - in_place), now, messages);
  push(connection.peer, messages);
  return {!state.session.ended(), std::nullopt};
}

bool FrameIo::read_ring(Connection& connection, Time now) {
  PeerState& state = *connection.peer;
  RingReader& ring = connection.shared->reader();
  bool has_read = false;
  std::vector<Message> messages;
  try {
    for (int i = 0; i < kConsumesInTurn && !state.session.ended(); ++i) {
      std::span<const std::byte> bytes = ring.peek();
      if (bytes.empty()) break;
      bytes = bytes.first(std::min(bytes.size(), kConsumeBytes));
      state.session.consume(bytes, now, messages);
      ring.consume(bytes.size());
      if (ring.take_wakeup()) send_wakeup(connection);
      state.counts.bytes_received += bytes.size();
      has_read = true;
    }
  } catch (const CommError& error) {
    state.session.end(DownKind::kFailed, base::message_of(error));
  }
  push(connection.peer, messages);
  return has_read;
}

std::optional<std::string> FrameIo::read_wakeups(Connection& connection, Time now) {
  bool is_over = false;
  for (int i = 0; i < kReadsOfWakeups; ++i) {
    const ssize_t size = ::recv(connection.socket.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (size > 0 || (size < 0 && errno == EINTR)) continue;
    is_over = size == 0 || errno != EAGAIN;
    break;
  }
  // What the peer wrote before it went is read first: by one turn, however much somebody still writes.
  read_ring(connection, now);
  if (is_over) return "the connection was closed";
  connection.waits_to_write = false;
  return std::nullopt;
}

void FrameIo::take_frames(Connection& connection, std::span<const std::byte> frames, Time now) {
  std::vector<Message> messages;
  connection.peer->session.consume(frames, now, messages);
  push(connection.peer, messages);
}

void FrameIo::push(const std::shared_ptr<PeerState>& peer, std::vector<Message>& messages) {
  peer->counts.messages_received += messages.size();
  for (Message& message : messages) hand_over_.push({peer, false, std::move(message), std::nullopt});
}

void FrameIo::flush(PeerState& state) {
  const std::shared_ptr<Connection> connection = state.connection;
  if (!connection || !connection->has_frames() || connection->waits_to_write) return;
  std::size_t left = connection->shared ? kRingFlushBytes : kSocketFlushBytes;
  while (state.session.wants_to_write()) {
    if (left == 0) return state.wake();
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

// Writes of `parts_` what the socket takes, and returns how many bytes. 0: it is written once the socket is
// writable, or there is an error, which the loop reads.
std::size_t FrameIo::write_socket(Connection& connection) {
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

// The same with a ring in the socket's place.
std::size_t FrameIo::write_ring(Connection& connection) {
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
    connection.peer->wake();
    return 0;
  }
}

}  // namespace cohort::net::node_detail
