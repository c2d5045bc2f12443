#include "cohort/net/internal/loop/loop_core.h"

#include <unistd.h>

#include <asio/post.hpp>
#include <chrono>
#include <utility>

#include "cohort/base/process.h"
#include "cohort/base/secret.h"
#include "cohort/net/internal/host.h"

namespace cohort::net::node_detail {
namespace {

ProcessIdentity identity_of_process() {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return {std::to_string(now) + "-" + base::random_word(), place_of_process(),
          base::process_start(std::to_string(::getpid()))};
}

}  // namespace

LoopCore::LoopCore(NodeOptions given, std::shared_ptr<Handler> handler)
    : options(std::move(given)),
      self(identity_of_process()),
      heap(options.shared_memory ? std::make_shared<SharedHeap>(options.shared_cache) : nullptr),
      tls(options.tls ? std::make_unique<const TlsContext>(*options.tls) : nullptr),
      hand_over(lock, std::move(handler), [this] { asio::post(io, [this] { hand_over.locked([] {}); }); }) {}

}  // namespace cohort::net::node_detail
