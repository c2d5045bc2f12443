// TCP sockets send at once (TCP_NODELAY), and are writable only while less than 256 KiB wait in the kernel
// (TCP_NOTSENT_LOWAT): what lies there cannot be overtaken by a short message. All sockets are non-blocking,
// and closed by exec, so a program that a rank starts does not keep a connection open. Only
// resolve_all() can take long: it asks the name server, on the thread of its caller. The others that resolve
// names do so on a detached one.
#include "cohort/net/internal/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/net/lookup_timeout.h"
#include "cohort/net/unknown_host.h"

namespace cohort::net {
namespace {

constexpr std::string_view kUnix = "unix:";
constexpr int kUnsentBytes = 256 * 1024;
constexpr std::chrono::seconds kPatienceWithFamily(5);

SocketAddress unix_address(std::string_view name) {
  SocketAddress address;
  auto& to = reinterpret_cast<sockaddr_un&>(address.storage);
  if (name.empty() || name.size() >= sizeof to.sun_path) {
    throw UsageError("net.address", base::concat("the name of a local socket has ", name.size(),
                                                 " bytes, expected 1 to ", sizeof to.sun_path - 1));
  }
  to.sun_family = AF_UNIX;
  name.copy(to.sun_path, name.size());
  if (name[0] == '@') to.sun_path[0] = '\0';  // an abstract name begins with 0 and has no 0 at its end
  address.size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + (name[0] == '@' ? 0 : 1));
  return address;
}

// `error`: an errno. A name server that fails has said nothing of the name.
[[noreturn]] void throw_lookup_failure(const std::string& text, int status, int error) {
  const char* const why = status == EAI_SYSTEM ? std::strerror(error) : ::gai_strerror(status);
  if (status == EAI_NONAME || status == EAI_NODATA)
    throw UnknownHost("net.address", base::concat("the address ", text, " is not known: ", why));
  throw RendezvousError("net.address", base::concat("the address ", text, " cannot be looked up: ", why));
}

std::vector<SocketAddress> tcp_addresses(const std::string& text, int flags) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon + 1 == text.size()) {
    throw UsageError("net.address", base::concat("'", text, "' is no address"),
                     "host:port, [ipv6]:port or unix:/path");
  }
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int status =
      ::getaddrinfo(host.empty() ? nullptr : host.c_str(), text.c_str() + colon + 1, &hints, &found);
  if (status != 0) throw_lookup_failure(text, status, errno);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
  }
  return addresses;
}

std::vector<SocketAddress> addresses_of(const std::string& text, int flags) {
  std::vector<SocketAddress> addresses;
  if (text.starts_with(kUnix)) {
    addresses = {unix_address(std::string_view(text).substr(kUnix.size()))};
  } else {
    addresses = tcp_addresses(text, flags);
  }
  for (SocketAddress& address : addresses) address.text = text;
  return addresses;
}

// Empty, with an errno, where none can be had.
base::Fd open_socket(const SocketAddress& address) {
  return base::Fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set_options(int fd) {
  const int on = 1;
  // They fail for a local socket, which needs neither.
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes));
}

std::string text_of(const sockaddr_storage& storage, socklen_t size, const std::string& own_host = "") {
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  ::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), size, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
  std::string name = host;
  if (name == "0.0.0.0" || name == "::") name = own_host.empty() ? base::host_name() : own_host;
  if (name.find(':') != std::string::npos) name = "[" + name + "]";
  return name + ":" + port;
}

std::string bound_address(int fd, const SocketAddress& wanted, const std::string& host) {
  if (wanted.is_unix()) return wanted.text;
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size);
  return text_of(storage, size, host);
}

// An IPv6 socket that takes IPv4 too has ::ffff:10.0.0.2 for the other side's 10.0.0.2.
void make_plain(SocketAddress& address) {
  const auto in6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  if (in6.sin6_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) return;
  address.storage = {};
  auto& in = reinterpret_cast<sockaddr_in&>(address.storage);
  in.sin_family = AF_INET;
  in.sin_port = in6.sin6_port;
  std::memcpy(&in.sin_addr, &in6.sin6_addr.s6_addr[12], sizeof in.sin_addr);
  address.size = sizeof in;
}

SocketAddress end_by(int (*name)(int, sockaddr*, socklen_t*), int socket) {
  SocketAddress end;
  end.size = sizeof end.storage;
  if (name(socket, reinterpret_cast<sockaddr*>(&end.storage), &end.size) != 0) return {};
  make_plain(end);
  int is_ipv6_only = 1;
  socklen_t size = sizeof is_ipv6_only;
  static_cast<void>(::getsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &is_ipv6_only, &size));
  end.takes_ipv4 = end.storage.ss_family == AF_INET6 && is_ipv6_only == 0;
  end.text = end.is_unix() ? "a process of this host" : text_of(end.storage, end.size);
  return end;
}

std::vector<SocketAddress> wait_for_addresses(const std::string& text, base::Deadline deadline) {
  auto found = begin_to_resolve(text);
  if (found.wait(deadline)) return found.get(deadline);
  throw LookupTimeout("net.address", base::concat("no name server has said where the host of ", text, " is"));
}

bool read_peer(int socket, ucred& peer) {
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
}

}  // namespace

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(storage);
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  if (storage.ss_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(storage);
    return IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
  }
  return false;
}

std::uint16_t SocketAddress::port() const {
  if (storage.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return 0;
}

void SocketAddress::set_port(std::uint16_t port) {
  if (storage.ss_family == AF_INET) reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  if (storage.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
}

bool SocketAddress::covers(const SocketAddress& host) const {
  if (takes_ipv4 && host.storage.ss_family == AF_INET)
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  if (storage.ss_family != host.storage.ss_family) return false;
  if (storage.ss_family == AF_INET) {
    const in_addr_t own = reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr;
    return own == htonl(INADDR_ANY) ||
           own == reinterpret_cast<const sockaddr_in&>(host.storage).sin_addr.s_addr;
  }
  if (storage.ss_family != AF_INET6) return false;
  const in6_addr& own = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&own) ||
         std::memcmp(&own, &reinterpret_cast<const sockaddr_in6&>(host.storage).sin6_addr, sizeof own) == 0;
}

std::vector<SocketAddress> resolve_all(const std::string& text) {
  return addresses_of(text, 0);
}

base::Future<std::vector<SocketAddress>> begin_to_resolve(const std::string& text) {
  constexpr const char* kWhat = "the address of a host";
  try {
    base::Promise<std::vector<SocketAddress>> known(kWhat);
    std::vector<SocketAddress> addresses = addresses_of(text, AI_NUMERICHOST);
    known.run([&] { return std::move(addresses); });
    return known.future();
  } catch (const UnknownHost&) {  // it is no number
    try {
      return base::run_detached(kWhat, [text] { return resolve_all(text); });
    } catch (const std::system_error& error) {
      throw RendezvousError("net.address",
                            base::concat("no thread can be had to look up ", text, ": ", error.what()));
    }
  }
}

std::string parse_host(const std::string& text) {
  const bool has_brackets = text.starts_with('[') && text.ends_with(']') && text.size() > 2;
  std::string host = has_brackets ? text.substr(1, text.size() - 2) : text;
  const std::size_t colon = host.find_first_of(":[]");
  in6_addr address{};
  if (colon == std::string::npos ||
      ::inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &address) == 1) {
    return host;
  }
  throw UsageError("net.address",
                   base::concat("'", text, "' is no name or address by which others reach this host"),
                   "one without a port: node-1, 10.0.0.2, fd00::2");
}

std::optional<bool> has_ipv6_alone(const std::string& host) {
  try {
    const auto addresses =
        wait_for_addresses(base::concat('[', host, "]:0"), base::Deadline(kPatienceWithFamily));
    return std::ranges::none_of(
        addresses, [](const SocketAddress& address) { return address.storage.ss_family == AF_INET; });
  } catch (const RendezvousError&) {
    return std::nullopt;
  }
}

SocketAddress resolve(const std::string& text, base::Deadline deadline) {
  return wait_for_addresses(text, deadline).front();
}

base::Fd listen_at(const SocketAddress& address, std::string& bound, const std::string& host) {
  base::Fd fd = open_socket(address);
  if (!fd.is_open())
    throw SystemError("net.socket", base::concat("no socket can be had: ", std::strerror(errno)));
  // A restarted process can listen at its port while old connections are in TIME_WAIT.
  const int on = 1;
  static_cast<void>(::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
  const int off = 0;  // whatever net.ipv6.bindv6only says; other families have no such option
  static_cast<void>(::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) != 0 ||
      ::listen(fd.get(), 1024) != 0) {
    throw RendezvousError("net.listen",
                          base::concat("cannot listen at ", address.text, ": ", std::strerror(errno)));
  }
  bound = bound_address(fd.get(), address, host);
  return fd;
}

base::Fd accept_from(int listener) {
  base::Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.is_open()) return fd;
  if (!is_of_own_user(fd.get())) {
    fd.close();
    errno = EACCES;  // accept4() has left that of an earlier call
    return fd;
  }
  set_options(fd.get());
  return fd;
}

base::Fd start_connect(const SocketAddress& address) {
  base::Fd fd = open_socket(address);
  if (!fd.is_open()) return fd;
  set_options(fd.get());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0) return fd;
  // connect_error() says how it ended, once the socket is writable.
  if (errno == EINPROGRESS) return fd;
  const int error = errno;  // the caller reads it, and close() may change it
  fd.close();
  errno = error;
  return fd;
}

int connect_error(int socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

std::string peer_address(int socket) {
  return peer_end(socket).text;
}

SocketAddress own_end(int socket) {
  return end_by(::getsockname, socket);
}

SocketAddress peer_end(int socket) {
  return end_by(::getpeername, socket);
}

bool is_of_own_user(int socket) {
  ucred peer{};
  return !is_local(socket) || (read_peer(socket, peer) && (peer.uid == ::geteuid() || peer.uid == 0));
}

bool is_connected_to_itself(int socket) {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         own.ss_family != AF_UNIX &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&other), &other_size) == 0 &&
         own_size == other_size && std::memcmp(&own, &other, own_size) == 0;
}

pid_t peer_process(int socket) {
  ucred peer{};
  return is_local(socket) && read_peer(socket, peer) ? peer.pid : 0;
}

bool is_local(int socket) {
  int family = 0;
  socklen_t size = sizeof family;
  return ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 && family == AF_UNIX;
}

// Descriptors go with the first byte, so they are sent even if only a part of `bytes` is.
ssize_t send_with_descriptors(int socket, std::string_view bytes, std::span<const int> fds) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// There is room for kMaxDescriptors: the kernel closes further ones that come together.
ssize_t receive_with_descriptors(int socket, std::span<std::byte> bytes, std::vector<base::Fd>& fds) {
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(kMaxDescriptors * sizeof(int));
  const ssize_t size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (size < 0) return size;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int came = -1;
      std::memcpy(&came, CMSG_DATA(header) + at, sizeof came);
      // Owned before it is counted: one that is too many is closed.
      base::Fd fd(came);
      if (fds.size() < kMaxDescriptors) fds.push_back(std::move(fd));
    }
  }
  return size;
}

}  // namespace cohort::net
