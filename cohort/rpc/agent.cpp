// The public agent is a front: AgentState does the work. Handlers and answers on other threads may hold the
// state longer than the Agent lives, so the state is shared, and ~Agent() stops it instead of destroying it.
// Names of workers are checked here. They stand beside patterns of fnmatch(), so they have none of its
// special characters.
#include "cohort/rpc/agent.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {
namespace {

constexpr std::size_t kMaxNameBytes = 127;

bool is_device(const std::string& name) {
  try {
    return c10::Device(name).type() < c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES;
  } catch (const c10::Error&) {
    return false;
  }
}

void check_name(const std::string& name) {
  const auto is_allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-:./").find(c) != std::string_view::npos;
  };
  if (name.empty() || name.size() > kMaxNameBytes || !std::all_of(name.begin(), name.end(), is_allowed)) {
    throw UsageError("rpc.join", base::concat("'", name, "' is no name of a worker"),
                     "1 to 127 letters, digits and _-:./");
  }
  if (is_device(name)) {
    throw UsageError("rpc.join", base::concat("the worker's name '", name, "' is that of a device"),
                     "worker/" + name);
  }
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() >= 0) return;
  throw UsageError("rpc.timeout", base::concat("got a timeout of ", timeout.count(), " ms"), "0 for none");
}

}  // namespace

Agent::Agent(std::string name, int id, int world_size, base::KeyValueStore& store, AgentOptions options) {
  check_name(name);
  check_timeout(options.timeout);
  state_ = std::make_shared<AgentState>(WorkerInfo{std::move(name), id}, std::move(options));
  try {
    state_->join(world_size, store);
  } catch (...) {
    state_->stop();  // ~Agent() does not run; threads and connections may have begun
    throw;
  }
  if (world_size > 1) {
    base::log_info(base::concat(self().name, " reaches ", describe_transports(metrics().traffic)));
  }
}

Agent::Agent(std::string name, base::KeyValueStore& store, AgentOptions options) {
  check_name(name);
  check_timeout(options.timeout);
  const base::Deadline deadline(options.join_timeout);
  check_group_kind(store, /*is_dynamic=*/true);
  constexpr const char* kHint = "a longer AgentOptions::silence";
  for (std::string why_again;;) {
    state_ = std::make_shared<AgentState>(WorkerInfo{name, claim_worker_id(store)}, options);
    const std::string why_before = std::exchange(why_again, "");
    try {
      why_again = state_->join_group(store, deadline);
    } catch (const RendezvousError&) {
      state_->stop();
      // Where the time is over while others are asked once more, the cause is that of the round before.
      if (!why_before.empty() && deadline.expired()) throw RendezvousError("rpc.join", why_before, kHint);
      throw;
    } catch (...) {
      state_->stop();
      throw;
    }
    if (why_again.empty()) break;
    state_->stop();
    if (deadline.expired()) throw RendezvousError("rpc.join", why_again, kHint);
  }
  try {
    state_->wait_for_workers(deadline);
  } catch (...) {
    state_->stop();
    throw;
  }
  const std::vector<WorkerTraffic> traffic = metrics().traffic;
  base::log_info(base::concat(self().name, " has joined as worker ", self().id,
                              traffic.empty() ? "" : ", and reaches ", describe_transports(traffic)));
}

Agent::~Agent() {
  state_->stop();
}

const WorkerInfo& Agent::self() const {
  return state_->self();
}

std::vector<WorkerInfo> Agent::workers(const std::string& pattern) const {
  std::vector<WorkerInfo> found;
  for (WorkerInfo& worker : state_->workers()) {
    // Without FNM_PATHNAME: * also matches the / of trainer/0.
    if (::fnmatch(pattern.c_str(), worker.name.c_str(), 0) == 0) found.push_back(std::move(worker));
  }
  return found;
}

base::Future<Encoded> Agent::call(const Target& target, const char* function, Encoded arguments) {
  return state_->call(state_->with_name(target), function, std::move(arguments));
}

std::shared_ptr<Reference> Agent::make(const Target& target, const char* function, Encoded arguments) {
  // The line of the caller's program names the object in rpc::metrics().
  return state_->make(state_->with_name(target), function, std::move(arguments),
                      base::concat(target.line.file_name(), ':', target.line.line()));
}

std::shared_ptr<Reference> Agent::make_here(ObjectValue value, Target::Line line) {
  return state_->make_here(std::move(value), line);
}

void Agent::shutdown(base::Deadline deadline) {
  state_->shutdown(deadline);
}

std::chrono::milliseconds Agent::timeout() const {
  return state_->timeout();
}

void Agent::set_timeout(std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  state_->set_timeout(timeout);
}

at::Tensor Agent::shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options) const {
  const bool is_contiguous =
      options.memory_format_opt().value_or(at::MemoryFormat::Contiguous) == at::MemoryFormat::Contiguous;
  if (!options.device().is_cpu() || options.layout() != at::kStrided || !is_contiguous ||
      options.pinned_memory()) {
    throw UsageError("rpc.shared_empty",
                     base::concat("got a tensor on ", options.device().str(), " of layout ", options.layout(),
                                  ", expected a dense one on the CPU, contiguous and not pinned"));
  }
  // Checked here: a size that wraps around would get a block that is too small.
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  std::size_t num_bytes = options.dtype().itemsize();
  for (const std::int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(num_bytes, static_cast<std::size_t>(size), &num_bytes)) {
      throw UsageError("rpc.shared_empty", base::concat("a tensor cannot have the sizes ", sizes));
    }
  }
  const std::shared_ptr<std::byte> memory = state_->allocate_shared(num_bytes);
  return tensor_over(memory, memory.get(), sizes, type).set_requires_grad(options.requires_grad());
}

AgentMetrics Agent::metrics() const {
  return state_->metrics();
}

}  // namespace cohort::rpc
