// LibTorch's Gloo backend. The only file that sees gloo/declarations. Gloo connects all pairs of ranks when
// it is made, and each of its waits has the whole timeout. So it is made on a thread that may be left behind
// at the deadline. A barrier in the store tells which ranks came to connect, and the error names the others.
// Always: a group that failed closes its connections, because Gloo cannot end one collective alone.
// Surprising: the address to listen on comes from the routing table, since a host's own name often leads to
// 127.0.1.1.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/error_cause.h"
#include "cohort/comm/internal/missing_ranks.h"
#include "cohort/comm/internal/pipe_signal.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/core/torch_compat.h"

namespace cohort::comm {
namespace {

// c10d cannot end one collective of Gloo's. Gloo closes its connections when one of its waits is over, but it
// counts from the last bytes that came, and not from the call.
class Gloo : public c10d::ProcessGroupGloo, public ClosesConnections {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  void abort() override { close("it was aborted"); }
  void close(const std::string& words) override {
    std::call_once(is_closed_, [&] { close_all(words); });
  }

 private:
  // Each connection waits for a turn of Gloo's loop, of up to 10 ms: side by side they wait for the same one.
  void close_all(const std::string& words) {
    constexpr int kThreads = 32;
    const base::Deadline deadline(std::chrono::seconds(1));
    std::vector<base::Future<void>> closing;
    for (const auto& context : contexts_) {
      for (int first = 0; first < std::min(kThreads, getSize()); ++first) {
        const auto close_some = [context, words, first, size = getSize()] {
          for (int rank = first; rank < size; rank += kThreads) {
            // Calls that wait for the connection get an error. Closing it alone would leave them waiting.
            auto* pair = dynamic_cast<::gloo::transport::tcp::Pair*>(context->getPair(rank).get());
            if (pair != nullptr) pair->signalExceptionExternal(words);
          }
        };
        try {
          closing.push_back(base::run_detached("closing connections", close_some));
        } catch (const std::system_error&) {  // no more threads
          close_some();
        }
      }
    }
    const bool all_are = std::ranges::all_of(closing, [&](auto& each) { return each.wait(deadline); });
    if (!all_are) return base::log_warning("[comm.gloo] connections of a group that failed do not close");
    for (const auto& context : contexts_) context->closeConnections();
  }

  std::once_flag is_closed_;
};

// An address of this host that others can come to: that of the route to everywhere, else of the first
// interface that is up; empty if there is none.
std::string own_address() {
  // Of a network that is for documentation: only the routing table is asked.
  const std::string routed = base::address_towards("192.0.2.1");
  if (!routed.empty() && !base::is_loopback(routed)) return routed;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  std::string result;
  for (const ifaddrs* at = list; at != nullptr && result.empty(); at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    if ((at->ifa_flags & IFF_UP) == 0 || (at->ifa_flags & IFF_LOOPBACK) != 0) continue;
    std::array<char, NI_MAXHOST> text{};
    if (::getnameinfo(at->ifa_addr, sizeof(sockaddr_in), text.data(), text.size(), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
      result = text.data();
    }
  }
  ::freeifaddrs(list);
  return result;
}

// Where this rank listens: `reach` is on the way to the others. On many a machine its own name leads to
// 127.0.1.1: true, but no address for other hosts to come to.
std::string address_for(const std::string& reach) {
  const bool asks_for_loopback = reach == "localhost" || reach == "::1" || reach.starts_with("127.");
  const std::string address = reach.empty() ? "" : base::address_towards(reach);
  return asks_for_loopback || !base::is_loopback(address) ? address : own_address();
}

using Devices = std::vector<std::shared_ptr<gloo::transport::Device>>;

Devices make_devices(const std::string& reach) {
  auto interfaces = base::env_string("COHORT_INTERFACE");
  if (!interfaces) interfaces = base::env_string("GLOO_SOCKET_IFNAME");
  try {
    if (!interfaces) {
      const std::string address = address_for(reach);
      return {address.empty() ? Gloo::createDefaultDevice() : Gloo::createDeviceForHostname(address)};
    }
    Devices devices;
    std::istringstream names(*interfaces);
    for (std::string name; std::getline(names, name, ',');) {
      devices.push_back(Gloo::createDeviceForInterface(name));
    }
    return devices;
  } catch (const std::exception& error) {
    throw CommError("comm.gloo",
                    base::concat("cannot listen on ", interfaces ? "interface " + *interfaces : "any address",
                                 ": ", error.what()),
                    "COHORT_INTERFACE=NAME, one of those that `ip address` lists, or several: a,b");
  }
}

// A rank that has come is not missing, though its error comes later, as its deadline does.
[[noreturn]] void throw_unconnected(const std::vector<int>& missing, int size) {
  if (missing.empty()) throw std::runtime_error("timed out: not all ranks have connected");
  throw MissingRanks<TimeoutError>(
      missing, "comm.gloo",
      base::concat(base::format_list("rank", missing), " of ", size, " did not come to connect"));
}

// Gloo waits for the connection of a rank that has died, also after the owner's end. Returns whether `made`
// is there by the deadline.
template <typename Made>
bool wait_until_connected(const Made& made, const BackendOptions& options) {
  if (options.owner == nullptr) return made.wait(options.deadline);
  constexpr std::chrono::milliseconds kLook(10);
  while (!made.wait(options.deadline.sooner(base::Deadline(kLook)))) {
    if (const std::exception_ptr end = options.owner->end()) std::rethrow_exception(end);
    if (options.deadline.expired()) return false;
  }
  return true;
}

}  // namespace

BackendInstance make_gloo(const BackendOptions& options) {
  StoreAdapter kv_store(options.store);
  base::StoreBarrier barrier(kv_store, "connecting", options.rank, options.size);
  barrier.arrive();
  // Ranks connect within the timeout of calls, and each wait of theirs has all of it: Gloo knows no deadline.
  // So the thread that connects may be left behind, and what it waits on with it.
  const c10::intrusive_ptr<c10d::Store> connection = options.connections->take();
  base::Future<c10::intrusive_ptr<Gloo>> made = base::run_detached("Gloo to connect", [options, connection] {
    const BlockedPipeSignal errors_not_signals;  // for Gloo's threads, which are made here
    auto gloo_options = Gloo::Options::create(options.timeout);
    gloo_options->devices = make_devices(options.reach);
    return c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>(options.prefix, connection),
                                     options.rank, options.size, gloo_options);
  });
  if (!wait_until_connected(made, options)) throw_unconnected(barrier.missing(), options.size);
  options.connections->give_back(connection);  // Gloo asks nothing more
  c10::intrusive_ptr<Gloo> backend;
  try {
    backend = made.get(options.deadline);
  } catch (const std::exception& error) {
    const bool is_late = options.deadline.expired() && cause_of(error) == ErrorCause::kTimeout;
    if (is_late) throw_unconnected(barrier.missing(), options.size);
    throw;
  }
  // The declarations would have to be wrong for this to differ; then nothing after it can be trusted.
  const auto base = backend->getBackendOptions();
  if (backend->getRank() != options.rank || backend->getSize() != options.size ||
      backend->getBackendName() != c10d::GLOO_BACKEND_NAME || base->timeout != options.timeout) {
    throw CommError("comm.gloo", "LibTorch's Gloo backend is laid out otherwise than Cohort was compiled for",
                    "build Cohort with the headers of the LibTorch that it runs with");
  }
  // It sends messages on the calling thread, without MSG_NOSIGNAL.
  return {.backend = backend, .type = c10d::ProcessGroup::BackendType::GLOO, .may_raise_sigpipe = true};
}

}  // namespace cohort::comm
