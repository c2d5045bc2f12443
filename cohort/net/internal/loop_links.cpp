// From a socket to a session: accepting, connecting, the handshake, reading. What is written is in loop.cpp.
//
// A process that ends is seen twice: its socket ends, and its pidfd becomes readable. The rest of the socket is read first,
// so nothing that it sent is lost.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/loop.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kMaxStrangers = 64;  // connections that have not proved that they know the secret
constexpr std::chrono::milliseconds kPauseWithoutDescriptors(100);

// A caller makes the memory and sends it with its hello, a listener maps what came. Without memory the socket serves.
bool make_shared_link(Connection& connection) {
  if (!is_local(connection.socket.get())) return false;
  const Role role = connection.peer->role;
  try {
    if (role == Role::kCaller) {
      base::SharedMemory memory = SharedLink::make_memory();
      connection.handshake->memory_to_send = memory.take_fd();
      connection.shared = std::make_unique<SharedLink>(std::move(memory), role);
    } else if (!connection.handshake->descriptors_that_came.empty() &&
               connection.handshake->protocol.peer().has_shared_link) {
      connection.shared = std::make_unique<SharedLink>(
          SharedLink::map_memory(connection.handshake->descriptors_that_came[0]), role);
    }
  } catch (const SystemError& error) {
    base::log_warning(base::concat("messages of this host go over a socket: ", base::message_of(error)));
  }
  return connection.shared != nullptr;
}

}  // namespace

void Loop::wait_to_accept(const std::shared_ptr<asio::posix::stream_descriptor>& listener) {
  listener->async_wait(
      asio::posix::stream_descriptor::wait_read, [this, listener](const asio::error_code& error) {
        if (error) return;
        locked([&] {
          if (accept_all(*listener)) return wait_to_accept(listener);
          // The listener stays readable: asked again at once, it would take a core.
          const auto pause = std::make_shared<asio::steady_timer>(io_, kPauseWithoutDescriptors);
          pause->async_wait([this, pause, listener](const asio::error_code& ended) {
            if (!ended) locked([&] { wait_to_accept(listener); });
          });
        });
      });
}

// False where a connection waits for which there is no descriptor.
bool Loop::accept_all(asio::posix::stream_descriptor& listener) {
  const Time now = Time::clock::now();
  while (true) {
    base::Fd fd = accept_from(listener.native_handle());
    if (!fd.is_open()) {
      // Of another user, or none left. Without descriptors the connection stays, and the oldest stranger goes.
      if (errno != EMFILE && errno != ENFILE) return true;
      // accept4() takes the descriptor before it looks whether somebody waits.
      if ((base::ready_events(listener.native_handle(), POLLIN) & POLLIN) == 0) return true;
      if (table_.handshakes().empty()) return false;
      const auto oldest = table_.handshakes().front();
      lose(oldest, now, "there were no descriptors left");
      continue;
    }
    std::size_t strangers = 0;
    std::shared_ptr<Connection> oldest;
    for (const auto& connection : table_.handshakes()) {
      if (connection->handshake->protocol.is_trusted() || connection->peer) continue;
      if (++strangers == 1) oldest = connection;
    }
    if (strangers >= kMaxStrangers) lose(oldest, now, "too many strangers came");
    try {
      add_connection(std::move(fd), Role::kListener, nullptr, now);
    } catch (const SystemError& error) {
      base::log_warning(base::concat("a connection was rejected: ", base::message_of(error)));
    }
  }
}

std::shared_ptr<Connection> Loop::add_connection(base::Fd fd, Role role, std::shared_ptr<PeerState> peer,
                                                 Time now) {
  auto connection = std::make_shared<Connection>(std::move(fd));
  const int socket = connection->socket.get();
  connection->peer = std::move(peer);
  connection->handshake.emplace(Handshake(role, options_.secret, base::random_word()), role,
                                now + options_.handshake);
  if (tls_ && !is_local(socket)) connection->tls = std::make_unique<TlsStream>(*tls_, socket, role);
  table_.add(connection);
  arm(connection->handshake->deadline);
  return connection;
}

void Loop::start_link(const std::shared_ptr<PeerState>& peer, Time now) {
  PeerState& state = *peer;
  if (state.connection) return;
  state.session.start_link();
  try {
    base::Fd fd = start_connect(*state.address);
    if (!fd.is_open()) {
      const int error = errno;
      state.last_error = std::strerror(error);
      // A local socket that is gone may be that of a process which has not ended: its pidfd says.
      return state.session.connect_failed((error == ECONNREFUSED || error == ENOENT) && !state.process.end,
                                          now);
    }
    state.connection = add_connection(std::move(fd), Role::kCaller, peer, now);
  } catch (const SystemError& error) {
    state.last_error = base::message_of(error);
    state.session.connect_failed(false, now);
  }
}

// Under the mutex.
void Loop::wait_for_sockets() {
  sockets_.async_wait(asio::posix::stream_descriptor::wait_read, [this](const asio::error_code& error) {
    if (error) return;
    locked([this] {
      poll_sockets();
      wait_for_sockets();  // before messages are handed over: a function of the handler may keep this thread
    });
  });
}

// Under the mutex. Reads and writes one socket that is ready: others wait for the mutex, and what has come is handed over
// without it. False where none is.
bool Loop::poll_sockets() {
  const ConnectionTable::Ready ready = table_.next_ready();
  const std::shared_ptr<Connection>& connection = ready.connection;
  if (!connection) return false;
  if (ready.is_writable && connection->interest.writes) on_writable(connection);
  if (ready.is_readable && !connection->is_closed && !connection->is_connecting()) read(connection);
  return true;
}

void Loop::on_writable(const std::shared_ptr<Connection>& connection) {
  connection->waits_to_write = false;
  if (connection->is_connecting()) {
    connection->handshake->is_connecting = false;
    if (const int error = connect_error(connection->socket.get()); error != 0) {
      return lose(connection, Time::clock::now(), std::strerror(error), error == ECONNREFUSED);
    }
  }
  table_.update_interest(*connection);
  if (connection->handshake) {
    write_handshake(connection);
    // What OpenSSL has read already makes no socket readable.
    if (connection->tls && connection->handshake && !connection->is_closed) read(connection);
    return;
  }
  flush(*connection->peer);
  update_peer(connection->peer, Time::clock::now());
}

void Loop::read(const std::shared_ptr<Connection>& connection) {
  const Time now = Time::clock::now();
  connection->handshake ? read_handshake(connection, now) : read_frames(connection, now);
  if (connection->peer && !connection->handshake) {
    flush(*connection->peer);
    update_peer(connection->peer, now);
  }
}

void Loop::read_frames(const std::shared_ptr<Connection>& connection, Time now) {
  if (connection->shared) return read_wakeups(connection, now);
  if (options_.spin.count() > 0) active_.look_at_sockets();
  read_socket(connection, now);
}

void Loop::read_handshake(const std::shared_ptr<Connection>& connection, Time now) {
  if (connection->handshake->is_rejected) return drop_input(connection, now);
  if (connection->tls) write_handshake(connection);  // what waited for the TLS handshake
  if (connection->is_closed || connection->handshake->is_rejected ||
      (connection->tls && !connection->tls->is_ready()))
    return;
  const iovec room{buffer_.data(), TlsStream::kMinReadBytes};
  const ssize_t size =
      connection->tls ? connection->tls->read({&room, 1})
                      : receive_with_descriptors(connection->socket.get(), std::span(buffer_).first(1024),
                                                 connection->handshake->descriptors_that_came);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0 && !(size < 0 && errno == EPROTO && connection->tls)) {
    return lose(connection, now,
                size == 0 ? "the connection was closed during the handshake" : std::strerror(errno));
  }
  try {
    if (size < 0) throw connection->tls->failure();
    connection->handshake->protocol.feed(
        {reinterpret_cast<const char*>(buffer_.data()), static_cast<std::size_t>(size)});
    if (connection->handshake->protocol.is_time_for_hello() && !answer_hello(connection)) return;
  } catch (const CommError& error) {
    return fail_handshake(connection, now, error);
  }
  write_handshake(connection);
  if (!connection->is_closed && connection->handshake->protocol.is_done()) finish_handshake(connection, now);
}

// Returns whether something came.
bool Loop::read_socket(const std::shared_ptr<Connection>& connection, Time now) {
  PeerState& state = *connection->peer;
  const std::span<std::byte> target = state.session.target();
  // One system call fills what is left of a long payload in place, and reads the frames after it.
  const iovec parts[] = {{target.data(), target.size()}, {buffer_.data(), buffer_.size()}};
  const std::size_t first = target.empty() ? 1 : 0;
  const ssize_t got = connection->tls
                          ? connection->tls->read(std::span(parts).subspan(first))
                          : ::readv(connection->socket.get(), parts + first, static_cast<int>(2 - first));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return errno == EINTR;
  if (got <= 0) {
    lose(connection, now,
         got == 0          ? "the connection was closed"
         : connection->tls ? connection->tls->error()
                           : std::strerror(errno));
    return false;
  }
  const auto size = static_cast<std::size_t>(got);
  state.counts.bytes_received += size;
  std::vector<Message> messages;
  const std::size_t in_place = std::min(size, target.size());
  if (in_place > 0) state.session.filled(in_place, now, messages);
  if (size > in_place) state.session.consume(std::span(buffer_).first(size - in_place), now, messages);
  take_messages(connection->peer, messages);
  return !state.session.ended();
}

void Loop::take_messages(const std::shared_ptr<PeerState>& peer, std::vector<Message>& messages) {
  peer->counts.messages_received += messages.size();
  for (Message& message : messages) hand_over_.push({peer, false, std::move(message), std::nullopt});
}

void Loop::write_handshake(const std::shared_ptr<Connection>& connection) {
  if (connection->tls && !has_tls(connection, Time::clock::now())) return;
  connection->handshake->output += connection->handshake->protocol.take_output();
  while (!connection->handshake->output.empty()) {
    std::vector<int> descriptors;
    if (connection->handshake->memory_to_send.is_open())
      descriptors.push_back(connection->handshake->memory_to_send.get());
    if (const int heap = connection->handshake->shows_heap ? heap_->descriptor() : -1; heap >= 0)
      descriptors.push_back(heap);
    const iovec bytes{connection->handshake->output.data(), connection->handshake->output.size()};
    const ssize_t size = connection->tls ? connection->tls->write({&bytes, 1})
                                         : send_with_descriptors(connection->socket.get(),
                                                                 connection->handshake->output, descriptors);
    if (size < 0 && errno == EINTR) continue;
    if (size == 0) return;  // TLS has to read first
    if (size < 0 && errno == EAGAIN) {
      return table_.wait_to_write(*connection);
    }
    if (size < 0) return lose(connection, Time::clock::now(), std::strerror(errno));
    connection->handshake->memory_to_send.close();
    connection->handshake->shows_heap = false;
    connection->handshake->output.erase(0, static_cast<std::size_t>(size));
  }
}

Hello Loop::own_hello(Connection& connection) const {
  const PeerState& peer = *connection.peer;
  Hello hello;
  hello.name = options_.name;
  hello.incarnation = incarnation_;
  hello.session = peer.identity.session;
  hello.links = static_cast<std::uint64_t>(peer.session.num_links());
  hello.received = peer.session.received();
  hello.place = place_;
  hello.process = ::getpid();
  hello.began = began_;
  hello.has_shared_link = options_.shared_memory && make_shared_link(connection);
  connection.handshake->shows_heap = hello.has_shared_link;
  return hello;
}

// Null where payloads do not go by handle. The end of a process that is not seen would leave its blocks in use for ever.
std::shared_ptr<const Handles> Loop::handles_for(Connection& connection, const Hello& hello) const {
  if (!connection.shared || hello.place != place_) return nullptr;
  PeerState& peer = *connection.peer;
  if (!peer.process.holder)
    peer.process.holder = std::make_shared<Holder>(static_cast<pid_t>(hello.process), hello.began);
  const std::size_t index =
      peer.role == Role::kListener ? 1 : 0;  // after the link's memory, which a caller makes
  if (!peer.process.heap && index < connection.handshake->descriptors_that_came.size()) {
    try {
      peer.process.heap = MappedHeap::map(connection.handshake->descriptors_that_came[index]);
    } catch (const SystemError& error) {
      base::log_warning(
          base::concat("large messages of ", hello.name, " are copied: ", base::message_of(error)));
    }
  }
  return std::make_shared<Handles>(heap_, peer.process.heap, peer.process.holder);
}

// A caller says who it is. A listener finds, or makes, the peer of the session that the caller names. False where the
// connection is of no use.
bool Loop::answer_hello(const std::shared_ptr<Connection>& connection) {
  Handshake& handshake = connection->handshake->protocol;
  if (connection->peer) {
    handshake.set_hello(own_hello(*connection));
    return true;
  }
  const Hello& hello = handshake.peer();
  for (const auto& peer : peers_) {
    const PeerState& state = *peer;
    if (state.role == Role::kListener && state.identity.session == hello.session &&
        state.identity.incarnation == hello.incarnation && !state.session.ended()) {
      connection->peer = peer;
    }
  }
  if (!connection->peer && hello.links == 0 && !node_.is_closing) {
    connection->peer = make_peer(Role::kListener);
    PeerState& state = *connection->peer;
    state.identity.name = hello.name;
    state.identity.incarnation = hello.incarnation;
    state.identity.session = hello.session;
  }
  if (connection->peer) {
    handshake.set_hello(own_hello(*connection));
    return true;
  }
  Hello unknown;  // session 0
  unknown.name = options_.name;
  unknown.incarnation = incarnation_;
  handshake.set_hello(unknown);
  write_handshake(connection);
  lose(connection, Time::clock::now(), "the session is not known");
  return false;
}

void Loop::finish_handshake(const std::shared_ptr<Connection>& connection, Time now) {
  const std::shared_ptr<PeerState> peer = connection->peer;
  PeerState& state = *peer;
  const Hello hello = connection->handshake->protocol.peer();
  const std::string rest = connection->handshake->protocol.take_rest();
  table_.end_handshake(*connection);
  if (state.role == Role::kCaller) {
    if (state.identity.incarnation.empty()) {
      state.identity.name = hello.name;
      state.identity.incarnation = hello.incarnation;
    }
    if (state.identity.incarnation != hello.incarnation) {
      state.session.end(DownKind::kDied, "died: another process has taken its place");
    } else if (hello.session == 0) {
      state.session.end(DownKind::kDied,
                        state.session.num_links() == 0 ? "is leaving" : "has given this process up");
    }
  } else if (state.connection && state.connection != connection) {
    table_.close(*state.connection);  // it is broken, and this side has not seen it
    state.session.link_down(now);
  }
  if (!hello.has_shared_link) connection->shared.reset();
  const std::shared_ptr<const Handles> handles = handles_for(*connection, hello);
  connection->handshake.reset();
  table_.update_interest(*connection);
  if (state.session.ended()) {
    table_.close(*connection);
    if (state.connection == connection) state.connection.reset();
    return update_peer(peer, now);
  }
  state.connection = connection;
  state.session.link_up(hello.received, now, handles);
  ++state.counts.links;
  if (state.role == Role::kListener && state.session.num_links() == 1) {
    hand_over_.push({peer, true, std::nullopt, std::nullopt});
  }
  watch(peer, hello);
  if (connection->shared) {
    active_.keep(connection);
  } else if (!rest.empty()) {  // frames that came together with the handshake
    std::vector<Message> messages;
    state.session.consume(std::as_bytes(std::span(rest)), now, messages);
    take_messages(peer, messages);
  }
  node_.changed.notify_all();
}

void Loop::watch(const std::shared_ptr<PeerState>& peer, const Hello& hello) {
  PeerState& state = *peer;
  if (state.process.end || hello.place != place_ || hello.process == ::getpid()) return;
  base::Fd fd = base::open_process(static_cast<pid_t>(hello.process));
  // Its number may be another process's by now: asked after the descriptor is there.
  const std::string began = base::process_start(std::to_string(hello.process));
  // It is there, but no descriptor is left to read when it began: then only its silence is seen.
  if (began.empty() && (::kill(static_cast<pid_t>(hello.process), 0) == 0 || errno == EPERM)) return;
  if (began != hello.began) {
    return asio::post(
        io_, [this, peer, process = hello.process] { locked([&] { on_process_end(peer, process); }); });
  }
  if (!fd.is_open()) return;  // the kernel cannot watch it
  const auto descriptor = std::make_shared<asio::posix::stream_descriptor>(io_, fd.release());
  state.process.end = descriptor;
  descriptor->async_wait(asio::posix::stream_descriptor::wait_read,
                         [this, peer, process = hello.process](const asio::error_code& error) {
                           if (!error) locked([&] { on_process_end(peer, process); });
                         });
}

void Loop::on_process_end(const std::shared_ptr<PeerState>& peer, std::int64_t process) {
  const Time now = Time::clock::now();
  const std::shared_ptr<Connection> connection = peer->connection;
  const auto is_open = [&] { return connection && connection->has_frames() && !peer->session.ended(); };
  if (is_open() && connection->shared) read_ring(connection, now);  // all that the ring has
  while (is_open() && !connection->shared && read_socket(connection, now)) {
  }
  peer->session.end(DownKind::kDied, base::concat("died (process ", process, ")"));
  update_peer(peer, now);
}

void Loop::lose(const std::shared_ptr<Connection>& connection, Time now, const std::string& error,
                bool is_rejected) {
  table_.close(*connection);
  if (!connection->peer) return;
  const std::shared_ptr<PeerState> peer = connection->peer;
  PeerState& state = *peer;
  if (state.connection != connection) return;
  state.connection.reset();
  state.last_error = error;
  if (connection->handshake) {
    if (state.role == Role::kCaller) state.session.connect_failed(is_rejected && !state.process.end, now);
  } else {
    state.session.link_down(now);
  }
  update_peer(peer, now);
}

}  // namespace cohort::net::node_detail
