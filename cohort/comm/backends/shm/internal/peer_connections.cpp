// Each rank listens at a local socket and leaves its name on the store, with a random token. It connects to
// the ranks below it, which know it by their token, and accepts those above it. So each pair has one
// connection. Always: a rank listens until all ranks above it have connected. So a rank that is missing, and
// at whose socket nobody listens at two looks, has died. Later a descriptor of the peer's process tells of
// its death. The socket alone does not, since a child of the peer may hold it open.
#include "cohort/comm/backends/shm/internal/peer_connections.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/process.h"
#include "cohort/base/secret.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/missing_ranks.h"

namespace cohort::comm::shm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeerLook(200);  // between looks whether another rank has failed

// How to reach a rank.
struct Contact {
  std::string machine;  // the same for all processes that can share memory
  std::string host;     // for messages
  std::string address;  // of its socket
  std::string token;    // shows that who connects has read this
};

[[noreturn]] void fail_socket(const char* what) {
  throw SystemError("comm.shm", base::concat("cannot ", what, " a local socket: ", std::strerror(errno)));
}

base::Fd new_socket() {
  base::Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) fail_socket("make");
  return fd;
}

// The kernel chooses a name that is no file; returns it.
std::string listen_somewhere(const base::Fd& fd, int backlog) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(sa_family_t);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) fail_socket("bind");
  if (::listen(fd.get(), backlog) != 0) fail_socket("listen on");
  length = sizeof(address);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) fail_socket("name");
  return {address.sun_path + 1, length - sizeof(sa_family_t) - 1};
}

// Closed when nobody listens there: errno says why.
base::Fd connect_to(const std::string& name) {
  base::Fd fd = new_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // The name of a socket that is no file begins with a zero byte, which `name` does not have.
  const std::size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                static_cast<socklen_t>(sizeof(sa_family_t) + 1 + length)) != 0) {
    return base::Fd();
  }
  return fd;
}

// Two groups have the same processes as a rule, and one descriptor tells of a process's end.
std::shared_ptr<const base::Fd> process_of(pid_t pid) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<pid_t, std::weak_ptr<const base::Fd>>;
  const std::lock_guard lock(mutex);
  if (const auto fd = known[pid].lock()) {
    if (base::ready_events(fd->get(), POLLIN) == 0) return fd;  // else the number is another process's by now
  }
  base::Fd opened = base::open_process(pid);
  if (!opened.is_open()) return nullptr;
  auto fd = std::make_shared<const base::Fd>(std::move(opened));
  std::erase_if(known, [](const auto& process) { return process.second.expired(); });
  known[pid] = fd;
  return fd;
}

void send_words(const base::Fd& fd, const std::string& words, int rank) {
  if (::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(words.size())) {
    throw PeerError("comm.shm", base::concat("cannot speak to rank ", rank, ": ", std::strerror(errno)));
  }
}

ucred credentials_of(const base::Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) fail_socket("look at");
  return credentials;
}

// Another user of this host may have read the token where it stands.
bool is_our_users(const base::Fd& socket) {
  return credentials_of(socket).uid == ::geteuid();
}

// A number with a file descriptor, as sockets take and give them.
struct Parcel {
  Parcel() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  std::uint64_t number = 0;
  iovec data{&number, sizeof(number)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
};

// One that could not make the group says so, and the others need not wait for it.
void check_not_given_up(KeyValueStore& kv_store) {
  if (!kv_store.has("not made")) return;
  throw PeerError("comm.shm", kv_store.get("not made"), "look for the first rank that failed");
}

// Waits for every rank's contact.
std::vector<Contact> read_contacts(KeyValueStore& kv_store, int size, base::Deadline deadline) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(base::concat("contact/", rank));
  // Not by waits at the store: LibTorch's client writes a warning about each that ends early.
  auto next_look = base::Deadline(kPeerLook);
  const auto have_come = [&] {
    if (kv_store.has_all(keys)) return true;
    if (next_look.expired()) {
      check_not_given_up(kv_store);
      next_look = base::Deadline(kPeerLook);
    }
    return false;
  };
  if (!base::poll_until(have_come, deadline, milliseconds(50))) {
    check_not_given_up(kv_store);
    const std::vector<int> missing = base::missing_ranks(kv_store, "contact", size, deadline);
    throw MissingRanks<RendezvousError>(
        missing, "comm.shm", base::concat(base::format_list("rank", missing), " of ", size, " did not come"));
  }
  const std::vector<std::string> words = kv_store.get_all(keys);
  std::vector<Contact> contacts(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < contacts.size(); ++rank) {
    Contact& contact = contacts[rank];
    std::istringstream(words[rank]) >> contact.machine >> contact.host >> contact.address >> contact.token;
  }
  return contacts;
}

void check_same_machine(const std::vector<Contact>& contacts, int rank) {
  const Contact& own_contact = contacts[static_cast<std::size_t>(rank)];
  for (std::size_t other = 0; other < contacts.size(); ++other) {
    const Contact& theirs = contacts[other];
    if (theirs.machine == own_contact.machine) continue;
    throw UsageError("comm.shm",
                     base::concat("rank ", rank, " is on ", own_contact.host, ", rank ", other, " on ",
                                  theirs.host, theirs.host == own_contact.host ? " in another container" : "",
                                  ": they cannot share memory"),
                     "backend gloo; or groups of the ranks of one host");
  }
}

}  // namespace

PeerConnections::PeerConnections(KeyValueStore& kv_store, int rank, int size, base::Deadline deadline)
    : connections_(static_cast<std::size_t>(size)) {
  if (size == 1) return;
  const base::Fd listener = new_socket();
  const std::string address = listen_somewhere(listener, size);
  kv_store.set(base::concat("contact/", rank), base::concat(base::machine_id(), " ", base::host_name(), " ",
                                                            address, " ", base::random_word()));
  const std::vector<Contact> contacts = read_contacts(kv_store, size, deadline);
  check_same_machine(contacts, rank);
  for (int peer = 0; peer < rank; ++peer) {
    const Contact& contact = contacts[static_cast<std::size_t>(peer)];
    base::Fd socket;
    int error = 0;
    auto next_look = base::Deadline(kPeerLook);
    base::poll_until(
        [&] {
          socket = connect_to(contact.address);
          error = socket.is_open() ? 0 : errno;
          if (error == EAGAIN && next_look.expired()) {
            check_not_given_up(kv_store);
            next_look = base::Deadline(kPeerLook);
          }
          return error != EAGAIN;  // as many as it has room for stand before it
        },
        deadline);
    if (!socket.is_open()) {
      check_not_given_up(kv_store);
      if (error == EAGAIN) {
        throw MissingRanks<RendezvousError>(
            {peer}, "comm.shm", base::concat("rank ", peer, " of ", size, " has not accepted a connection"));
      }
      throw PeerError("comm.shm", base::concat("cannot connect to rank ", peer, ": ", std::strerror(error)));
    }
    if (!is_our_users(socket)) {
      throw PeerError("comm.shm",
                      base::concat("rank ", peer, " is a process of user ", credentials_of(socket).uid,
                                   ", this one of ", ::geteuid()),
                      "all ranks as one user");
    }
    send_words(socket, base::concat(contact.token, " ", rank), peer);
    adopt(peer, std::move(socket));
  }
  std::vector<std::string> addresses;
  for (const Contact& contact : contacts) addresses.push_back(contact.address);
  accept_others(listener, kv_store, addresses, contacts[static_cast<std::size_t>(rank)].token, rank,
                deadline);
}

// Waits for those above this rank to connect. A rank listens until all above it have: where nobody listens
// and no connection came, it has died.
void PeerConnections::accept_others(const base::Fd& listener, KeyValueStore& kv_store,
                                    const std::vector<std::string>& addresses, const std::string& token,
                                    int rank, base::Deadline deadline) {
  const auto is_here = [this](std::size_t peer) { return connections_[peer].socket.is_open(); };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (std::size_t peer = static_cast<std::size_t>(rank) + 1; peer < connections_.size(); ++peer) {
      if (!is_here(peer)) ranks.push_back(static_cast<int>(peer));
    }
    return ranks;
  };
  std::vector<base::Fd> strangers;  // connected, but have not said who they are
  std::vector<int> suspects;        // nobody listened at the last look
  auto next_look = base::Deadline(kPeerLook);
  while (!missing().empty()) {
    const bool is_over = deadline.expired();  // before the look: one that came in time counts
    std::vector<pollfd> watched{{listener.get(), POLLIN, 0}};
    for (const base::Fd& stranger : strangers) watched.push_back({stranger.get(), POLLIN, 0});
    base::wait_for_files(watched, next_look.sooner(deadline));
    // From the last one on, so that those before an erased one keep their places in `watched`.
    for (std::size_t i = strangers.size(); i-- > 0;) {
      if (watched[i + 1].revents == 0) continue;
      std::array<char, 128> words{};
      const ssize_t length = ::recv(strangers[i].get(), words.data(), words.size() - 1, 0);
      std::istringstream text(length > 0 ? std::string(words.data(), static_cast<std::size_t>(length)) : "");
      std::string sent_token;
      int peer = -1;
      text >> sent_token >> peer;
      if (sent_token == token && peer > rank && peer < static_cast<int>(connections_.size()) &&
          !is_here(static_cast<std::size_t>(peer)) && is_our_users(strangers[i])) {
        adopt(peer, std::move(strangers[i]));
      }
      strangers.erase(strangers.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (watched[0].revents != 0) {
      base::Fd stranger(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (stranger.is_open()) {
        strangers.push_back(std::move(stranger));
        continue;
      }
      // The connection stays where it is then, and the listener ready.
      if (errno == EMFILE || errno == ENFILE) {
        throw SystemError("comm.shm", "cannot accept a rank's connection: no more file descriptors",
                          errno == EMFILE ? "ulimit -n" : "sysctl fs.file-max");
      }
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) fail_socket("accept from");
    }
    if (is_over && !missing().empty()) {
      throw MissingRanks<RendezvousError>(missing(), "comm.shm",
                                          base::concat(base::format_list("rank", missing()), " of ",
                                                       connections_.size(), " did not connect"));
    }
    if (!next_look.expired()) continue;
    next_look = base::Deadline(kPeerLook);
    check_not_given_up(kv_store);
    std::vector<int> silent;
    for (const int peer : missing()) {
      if (connect_to(addresses[static_cast<std::size_t>(peer)]).is_open() || errno == EAGAIN) continue;
      silent.push_back(peer);
      if (std::ranges::find(suspects, peer) == suspects.end()) continue;
      throw PeerError("comm.shm", base::concat("rank ", peer, " died while the group was made"));
    }
    suspects = std::move(silent);
  }
}

void PeerConnections::adopt(int peer, base::Fd socket) {
  Connection& connection = connections_[static_cast<std::size_t>(peer)];
  const ucred credentials = credentials_of(socket);
  connection.pid = credentials.pid;
  // A child of the peer that lives on keeps the socket open; the process itself cannot be mistaken.
  if (connection.pid > 0) connection.process = process_of(connection.pid);
  connection.socket = std::move(socket);
}

void PeerConnections::send(int peer, int fd, std::uint64_t number) const {
  Parcel parcel;
  parcel.number = number;
  cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  ssize_t sent = -1;
  do {
    sent =
        ::sendmsg(connections_[static_cast<std::size_t>(peer)].socket.get(), &parcel.message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    throw PeerError("comm.shm",
                    base::concat("cannot hand memory to rank ", peer, ": ", std::strerror(errno)));
  }
}

std::optional<std::pair<std::uint64_t, base::Fd>> PeerConnections::receive(int peer) const {
  Parcel parcel;
  ssize_t length = -1;
  do {
    length = ::recvmsg(connections_[static_cast<std::size_t>(peer)].socket.get(), &parcel.message,
                       MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length >= 0 && (parcel.message.msg_flags & MSG_CTRUNC) != 0) {
    throw SystemError("comm.shm",
                      base::concat("cannot take memory of rank ", peer, ": no more file descriptors"),
                      "ulimit -n");
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  if (length != sizeof(parcel.number) || header == nullptr || header->cmsg_type != SCM_RIGHTS)
    return std::nullopt;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return std::pair(parcel.number, base::Fd(fd));
}

std::string PeerConnections::why_gone(int peer) const {
  const Connection& connection = connections_[static_cast<std::size_t>(peer)];
  const bool is_closed = base::ready_events(connection.socket.get(), POLLRDHUP) != 0;
  if (connection.process) {
    // The sockets of a process that ends are closed a moment before it is dead.
    const base::Deadline patience(milliseconds(is_closed && connection.pid != ::getpid() ? 100 : 0));
    pollfd process{connection.process->get(), POLLIN, 0};
    bool is_dead = false, is_over = false;
    while (!is_dead && !is_over) {  // a signal that is handled ends a wait early
      is_over = patience.expired();
      is_dead = base::wait_for_files({&process, 1}, patience) > 0;
    }
    if (is_dead) {
      return base::concat("died (process ", connection.pid, ")");
    }
  }
  if (!is_closed) return "";
  return connection.pid > 0 ? base::concat("closed its connection (process ", connection.pid, ")")
                            : "closed its connection";
}

}  // namespace cohort::comm::shm
