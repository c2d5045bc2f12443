// Each round tries all addresses of the host by a connect that does not block. A name is looked up on a
// detached thread, as a name server may be silent. Always: each round ends in bounded time, and looks at the
// deadline and at `interrupted`. Without a listener on this host, Linux may give a socket the very port that
// it connects to. Such a socket is connected to itself, and counts as ECONNREFUSED.
#include "cohort/base/threads/wait_for_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"

namespace cohort::base {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, std::uint16_t port, std::string& error, int flags = 0) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_STREAM;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) error = concat("the name cannot be resolved: ", ::gai_strerror(code));
  return {code == 0 ? found : nullptr, &::freeaddrinfo};
}

struct Resolved {
  Addresses addresses{nullptr, &::freeaddrinfo};
  std::string error;
};

// Name servers may be silent.
Future<Resolved> begin_to_resolve(const std::string& host, std::uint16_t port) {
  return run_detached("the address of a host", [host, port] {
    Resolved found;
    found.addresses = resolve(host, port, found.error);
    return found;
  });
}

std::string numeric(const addrinfo& address) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address.ai_addr, address.ai_addrlen, text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "";
  }
  return text.data();
}

bool any_is_loopback(const addrinfo* at) {
  for (; at != nullptr; at = at->ai_next) {
    if (at->ai_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(at->ai_addr);
      if ((ntohl(v4->sin_addr.s_addr) >> 24) == 127) return true;
    } else if (at->ai_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(at->ai_addr);
      if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) return true;
    }
  }
  return false;
}

// Where nobody listens on a port that the system also gives to who connects, a socket can come to be
// connected to itself.
bool leads_to_itself(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof here, there_size = sizeof there;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) == 0 &&
         here_size == there_size && std::memcmp(&here, &there, here_size) == 0;
}

bool connects(const addrinfo& address, milliseconds most, std::string& error) {
  const Fd fd(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) {
    error = std::strerror(errno);
    return false;
  }
  int failure = 0;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    failure = errno;
    if (failure == EINPROGRESS) {
      pollfd file{fd.get(), POLLOUT, 0};
      failure = ETIMEDOUT;
      if (wait_for_files({&file, 1}, Deadline(most)) > 0) {
        socklen_t size = sizeof failure;
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
      }
    }
  }
  if (failure == 0 && leads_to_itself(fd.get())) failure = ECONNREFUSED;
  if (failure != 0) error = std::strerror(failure);
  return failure == 0;
}

}  // namespace

std::optional<std::string> wait_for_listener(const std::string& host, std::uint16_t port, Deadline deadline,
                                             const ListenTarget& target,
                                             const std::function<bool()>& interrupted) {
  const std::string at =
      concat(host.find(':') == std::string::npos ? host : concat("[", host, "]"), ":", port);
  std::string error = "nobody tried";
  const Deadline patience{seconds(5)};  // ranks rarely start at the same moment: no message before that
  bool is_logged = false;
  Future<Resolved> asked;
  while (!interrupted || !interrupted()) {
    Resolved found;
    // An address in numbers needs no name server, and so no detached thread.
    found.addresses = resolve(host, port, found.error, AI_NUMERICHOST);
    if (found.addresses == nullptr) {
      if (!asked.valid()) asked = begin_to_resolve(host, port);
      const Deadline next(milliseconds(100));
      if (asked.wait(next)) {
        found = asked.get(next);
      } else {
        found.error = "no server has answered yet to which address the name has";
      }
    }
    if (found.addresses == nullptr) error = found.error;
    for (const addrinfo* address = found.addresses.get(); address != nullptr; address = address->ai_next) {
      // An address that drops packets must not take the time of the addresses after it.
      const milliseconds most(std::min(2000, deadline.remaining_ms()));
      if (connects(*address, most, error)) return numeric(*address);
    }
    if (deadline.expired()) {
      const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
      throw RendezvousError(
          target.where,
          concat("cannot reach ", target.name, " at ", at, " (waited ", waited, " ms): ", error),
          target.hint);
    }
    if (patience.expired() && !std::exchange(is_logged, true)) {
      log_info(concat("waiting for ", target.name, " at ", at, " (", error, ")"));
    }
    // A round that waited for the name server has had its pause.
    if (!asked.valid()) sleep(milliseconds(100), deadline);
  }
  return std::nullopt;
}

bool is_loopback(const std::string& host) {
  std::string error;
  return any_is_loopback(resolve(host, 1, error).get());
}

bool is_far_address(const std::string& text) {
  std::string error;
  const Addresses addresses = resolve(text, 1, error, AI_NUMERICHOST);
  return !text.empty() && addresses != nullptr && !any_is_loopback(addresses.get());
}

bool is_this_host(const std::string& host) {
  return host == "127.0.0.1" || host == "localhost" || host == "::1" || host == "[::1]";
}

}  // namespace cohort::base
