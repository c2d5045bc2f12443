#include "cohort/comm/tcp_store.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <thread>

#include "cohort/comm/numeric_names.h"
#include "cohort/core/deadline.h"
#include "cohort/core/error.h"
#include "cohort/core/fd.h"
#include "cohort/core/wait.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::TCPStore>;

constexpr milliseconds kSlack(2000);  // LibTorch tries once more after its own deadline
constexpr milliseconds kLook(50);     // between two questions whether to go on

// A socket that listens on 127.0.0.1 only. LibTorch's own listens on every address of the host.
core::Fd listen_on_loopback(std::uint16_t port) {
  core::Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!fd.is_open() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    throw SystemError("comm.store",
                      core::concat("cannot listen on 127.0.0.1:", port, ": ", std::strerror(errno)));
  }
  return fd;
}

}  // namespace

Store open_tcp_store(const TcpStoreOptions& options) {
  use_numeric_names();
  c10d::TCPStoreOptions given;
  given.port = options.port;
  if (options.serves && options.is_local) given.masterListenFd = listen_on_loopback(options.port).release();
  given.isServer = options.serves;
  given.waitWorkers = false;  // who is missing is found out later, by name
  given.timeout = options.timeout;
  // LibTorch has no deadline for the first answer: where something else listens on the port it waits for
  // ever, on a thread that is left behind then.
  std::packaged_task<Store()> task(
      [host = options.host, given] { return c10::make_intrusive<c10d::TCPStore>(host, given); });
  std::future<Store> store = task.get_future();
  std::thread(std::move(task)).detach();
  const core::Deadline deadline(options.timeout + kSlack);
  while (!core::wait(store, core::Deadline(kLook))) {
    if (options.interrupted && options.interrupted()) return {};
    deadline.check("comm.store", "an answer as a store gives it");
  }
  return store.get();
}

}  // namespace cohort::comm
