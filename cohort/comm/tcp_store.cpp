#include "cohort/comm/tcp_store.h"

#include <future>
#include <thread>

#include "cohort/core/deadline.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::TCPStore>;

constexpr milliseconds kSlack(2000);  // LibTorch tries once more after its own deadline
constexpr milliseconds kLook(50);     // between two questions whether to go on

}  // namespace

Store open_tcp_store(const TcpStoreOptions& options) {
  c10d::TCPStoreOptions given;
  given.port = options.port;
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
  while (store.wait_for(kLook) != std::future_status::ready) {
    if (options.interrupted && options.interrupted()) return {};
    deadline.check("comm.store", "an answer as a store gives it");
  }
  return store.get();
}

}  // namespace cohort::comm
