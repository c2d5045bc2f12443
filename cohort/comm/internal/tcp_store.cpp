#include "cohort/comm/internal/tcp_store.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/numeric_names.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using TcpStore = c10::intrusive_ptr<c10d::TCPStore>;

constexpr milliseconds kTcpSlack(200);  // for LibTorch's own error, which says more
constexpr milliseconds kLook(50);       // between two questions whether to continue

// A socket that listens on 127.0.0.1 only, or ::1. LibTorch's own listens on every address of the host.
base::Fd listen_on_loopback(bool is_ipv6, std::uint16_t port) {
  base::Fd fd(::socket(is_ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  v6.sin6_addr = in6addr_loopback;
  const auto* address = is_ipv6 ? reinterpret_cast<const sockaddr*>(&v6) : reinterpret_cast<sockaddr*>(&v4);
  if (!fd.is_open() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), address, is_ipv6 ? sizeof(v6) : sizeof(v4)) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    throw SystemError("comm.store", base::concat("cannot listen on ", is_ipv6 ? "[::1]:" : "127.0.0.1:", port,
                                                 ": ", std::strerror(errno)));
  }
  return fd;
}

}  // namespace

TcpStore open_tcp_store(const TcpStoreOptions& options) {
  use_numeric_names();
  c10d::TCPStoreOptions given;
  given.port = options.port;
  std::string host = options.host;
  if (options.serves && options.is_local) {
    const bool is_ipv6 = host.find(':') != std::string::npos;
    host = is_ipv6 ? "::1" : "127.0.0.1";
    // TCPStore owns the descriptor from here on, and closes it.
    given.masterListenFd = listen_on_loopback(is_ipv6, options.port).release();
  }
  given.isServer = options.serves;
  given.waitWorkers = false;  // who is missing is found out later, by name
  given.timeout = options.timeout;
  // LibTorch has no deadline for the first answer: where something else listens on the port it waits for
  // ever, on a thread that is left behind then.
  base::Future<TcpStore> store = base::run_detached(
      "a store", [host, given] { return c10::make_intrusive<c10d::TCPStore>(host, given); });
  const base::Deadline deadline(options.timeout + kTcpSlack);
  while (!store.wait(base::Deadline(kLook).sooner(deadline))) {
    if (options.interrupted && options.interrupted()) return {};
    deadline.check("comm.store", "an answer as a store gives it");
  }
  return store.get(deadline);
}

}  // namespace cohort::comm
