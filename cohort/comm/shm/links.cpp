#include "cohort/comm/shm/links.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "cohort/core/error.h"
#include "cohort/core/host.h"
#include "cohort/core/numbered.h"

namespace cohort::comm::shm {
namespace {

// How to reach a rank.
struct Contact {
  std::string machine;  // the same for all processes that can share memory
  std::string host;     // for messages
  std::string address;  // of its socket
  std::string token;    // shows that who connects has read this
};

std::string hex(const void* bytes, std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    const auto byte = static_cast<const unsigned char*>(bytes)[i];
    text += {kDigits[byte / 16], kDigits[byte % 16]};
  }
  return text;
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Processes that see the same boot and the same network can reach each other's sockets.
std::string this_machine() {
  std::array<char, 64> network{};
  const auto length = ::readlink("/proc/self/ns/net", network.data(), network.size());
  return first_line("/proc/sys/kernel/random/boot_id") + "/" +
         std::string(network.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
}

std::string new_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw SystemError("comm.shm", core::concat("no random numbers: ", std::strerror(errno)));
  }
  return hex(bytes.data(), bytes.size());
}

[[noreturn]] void fail_socket(const char* what) {
  throw SystemError("comm.shm", core::concat("cannot ", what, " a local socket: ", std::strerror(errno)));
}

core::Fd new_socket() {
  core::Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) fail_socket("make");
  return fd;
}

// The kernel chooses a name that is no file; returns it.
std::string listen_somewhere(const core::Fd& fd, int backlog) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(sa_family_t);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) fail_socket("bind");
  if (::listen(fd.get(), backlog) != 0) fail_socket("listen on");
  length = sizeof(address);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) fail_socket("name");
  return {address.sun_path + 1, length - sizeof(sa_family_t) - 1};
}

core::Fd connect_to(const std::string& name, int rank) {
  core::Fd fd = new_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                static_cast<socklen_t>(sizeof(sa_family_t) + 1 + length)) != 0) {
    throw PeerError("comm.shm", core::concat("cannot connect to rank ", rank, ": ", std::strerror(errno)));
  }
  return fd;
}

void say(const core::Fd& fd, const std::string& words, int rank) {
  if (::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(words.size())) {
    throw PeerError("comm.shm", core::concat("cannot speak to rank ", rank, ": ", std::strerror(errno)));
  }
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

// Waits for every rank's contact.
std::vector<Contact> read_contacts(Board& board, int size, core::Deadline deadline) {
  const std::vector<int> missing = core::missing_ranks(board, "contact", size, deadline);
  if (!missing.empty()) {
    throw RendezvousError("comm.shm",
                          core::concat(core::numbered("rank", missing), " of ", size, " did not come"));
  }
  std::vector<Contact> contacts(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < contacts.size(); ++rank) {
    Contact& contact = contacts[rank];
    std::istringstream(board.get(core::concat("contact/", rank))) >> contact.machine >> contact.host >>
        contact.address >> contact.token;
  }
  return contacts;
}

void check_same_machine(const std::vector<Contact>& contacts, int rank) {
  const Contact& mine = contacts[static_cast<std::size_t>(rank)];
  for (std::size_t other = 0; other < contacts.size(); ++other) {
    const Contact& theirs = contacts[other];
    if (theirs.machine == mine.machine) continue;
    throw UsageError(
        "comm.shm",
        core::concat("rank ", rank, " is on ", mine.host, ", rank ", other, " on ", theirs.host,
                     theirs.host == mine.host ? " in another container" : "", ": they cannot share memory"),
        "backend gloo; or groups of the ranks of one host");
  }
}

}  // namespace

Links::Links(Board& board, int rank, int size, core::Deadline deadline)
    : links_(static_cast<std::size_t>(size)) {
  if (size == 1) return;
  const core::Fd listener = new_socket();
  const std::string address = listen_somewhere(listener, size);
  board.set(core::concat("contact/", rank),
            core::concat(this_machine(), " ", core::host_name(), " ", address, " ", new_token()));
  const std::vector<Contact> contacts = read_contacts(board, size, deadline);
  check_same_machine(contacts, rank);
  for (int peer = 0; peer < rank; ++peer) {
    const Contact& contact = contacts[static_cast<std::size_t>(peer)];
    core::Fd socket = connect_to(contact.address, peer);
    say(socket, core::concat(contact.token, " ", rank), peer);
    adopt(peer, std::move(socket));
  }
  const std::string& token = contacts[static_cast<std::size_t>(rank)].token;
  std::vector<core::Fd> strangers;  // connected, but have not said who they are
  for (int known = rank + 1; known < size;) {
    std::vector<pollfd> watched{{listener.get(), POLLIN, 0}};
    for (const core::Fd& stranger : strangers) watched.push_back({stranger.get(), POLLIN, 0});
    if (deadline.expired()) {
      throw RendezvousError("comm.shm", core::concat(size - known, " of ", size, " ranks did not connect"));
    }
    ::poll(watched.data(), watched.size(), std::min(deadline.remaining_ms(), 1000));
    for (std::size_t i = strangers.size(); i-- > 0;) {
      if (watched[i + 1].revents == 0) continue;
      std::array<char, 128> words{};
      const ssize_t length = ::recv(strangers[i].get(), words.data(), words.size() - 1, 0);
      std::istringstream text(length > 0 ? std::string(words.data(), static_cast<std::size_t>(length)) : "");
      std::string said;
      int peer = -1;
      text >> said >> peer;
      if (said == token && peer > rank && peer < size &&
          !links_[static_cast<std::size_t>(peer)].socket.is_open()) {
        adopt(peer, std::move(strangers[i]));
        ++known;
      }
      strangers.erase(strangers.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (watched[0].revents != 0) {
      core::Fd stranger(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (stranger.is_open()) strangers.push_back(std::move(stranger));
    }
  }
}

void Links::adopt(int peer, core::Fd socket) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0) {
    link.pid = credentials.pid;
  }
  // A child of the peer that lives on keeps the socket open; the process itself cannot be mistaken.
  if (link.pid > 0) link.process = core::Fd(static_cast<int>(::syscall(SYS_pidfd_open, link.pid, 0)));
  link.socket = std::move(socket);
}

void Links::send(int peer, int fd, std::uint64_t number) const {
  Parcel parcel;
  parcel.number = number;
  cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  ssize_t sent = -1;
  do {
    sent = ::sendmsg(links_[static_cast<std::size_t>(peer)].socket.get(), &parcel.message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    throw PeerError("comm.shm",
                    core::concat("cannot hand memory to rank ", peer, ": ", std::strerror(errno)));
  }
}

std::optional<std::pair<std::uint64_t, core::Fd>> Links::receive(int peer) const {
  Parcel parcel;
  ssize_t length = -1;
  do {
    length =
        ::recvmsg(links_[static_cast<std::size_t>(peer)].socket.get(), &parcel.message, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  const cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  if (length != sizeof(parcel.number) || header == nullptr || header->cmsg_type != SCM_RIGHTS)
    return std::nullopt;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return std::pair(parcel.number, core::Fd(fd));
}

std::string Links::why_gone(int peer) const {
  const Link& link = links_[static_cast<std::size_t>(peer)];
  std::array<pollfd, 2> watched{{{link.process.get(), POLLIN, 0}, {link.socket.get(), POLLRDHUP, 0}}};
  if (::poll(watched.data(), watched.size(), 0) <= 0) return "";
  if ((watched[0].revents & POLLIN) != 0) return core::concat("died (process ", link.pid, ")");
  if ((watched[1].revents & (POLLHUP | POLLRDHUP | POLLERR)) == 0) return "";
  return link.pid > 0 ? core::concat("closed its connection (process ", link.pid, ")")
                      : "closed its connection";
}

}  // namespace cohort::comm::shm
