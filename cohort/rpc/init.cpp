// The agent of the process: made once, and kept beside the group over whose store it joined. Joining takes
// long and must not hold the mutex, so `is_joining` keeps a second init_rpc() out meanwhile. A join that
// fails takes the mark away, so init_rpc() may be called again. shutdown() forgets the agent only where
// Agent::shutdown() has not thrown: after a timeout it may be called again. The agent is shared, because
// another thread may be in a call, or in shutdown() too, while this one forgets it: the last of them destroys
// it.
#include "cohort/rpc/init.h"

#include <memory>
#include <mutex>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/comm/init.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/rpc/internal/agent/agent_state.h"

namespace cohort::rpc {
namespace {

struct Process {
  std::mutex mutex;
  comm::Group group;  // keeps the store
  std::shared_ptr<Agent> agent;
  bool is_joining = false;
  bool was_shut_down = false;  // the last agent
};

// Never destroyed: a process that ends without shutdown() is a death for the others.
Process& process() {
  static auto* const all = new Process;
  return *all;
}

// Under the mutex.
const std::shared_ptr<Agent>& agent_of(const Process& here) {
  if (here.agent == nullptr) throw UsageError("rpc.init", "this process has no agent", "rpc::init_rpc(name)");
  return here.agent;
}

// The address by which this host reaches the group's rank 0, as others then reach this one; empty: its name
// will do.
std::string address_towards_rank_0(const comm::Group& group) {
  const std::string& rank_0 = group.reach();
  const std::string own = rank_0.empty() ? "" : base::address_towards(rank_0);
  // On rank 0's own host its name may be one of the loopback interface, as Debian has it. All others have
  // reached it by this name.
  const bool is_loopback = !own.empty() && !base::is_far_address(own);
  if (is_loopback && !base::is_this_host(rank_0) && !rank_0.starts_with("127.")) return rank_0;
  // Not that of an interface, whose number is this host's alone.
  return base::is_far_address(own) && own.find('%') == std::string::npos ? own : "";
}

}  // namespace

Agent& init_rpc(std::string name, RpcOptions options) {
  Process& here = process();
  {
    const std::lock_guard lock(here.mutex);
    if (here.agent != nullptr || here.is_joining) {
      throw UsageError("rpc.init", "this process has an agent", "rpc::Agent, of which it may have several");
    }
    here.is_joining = true;
  }
  comm::Group group;
  std::shared_ptr<Agent> made;
  try {
    if (options.store != nullptr) {
      if (options.group) throw UsageError("rpc.init", "got a store and a group", "one of both");
      made = std::make_shared<Agent>(std::move(name), *options.store, options.agent);
    } else {
      group = options.group
                  ? options.group
                  : comm::init_process_group({.backend = "gloo", .timeout = options.agent.join_timeout});
      comm::StoreAdapter store(group.store());
      if (options.agent.host.empty()) options.agent.host = address_towards_rank_0(group);
      made = std::make_shared<Agent>(std::move(name), group.rank(), group.size(), store, options.agent);
    }
  } catch (...) {
    const std::lock_guard lock(here.mutex);
    here.is_joining = false;
    throw;
  }
  const std::lock_guard lock(here.mutex);
  here.group = std::move(group);
  here.agent = std::move(made);
  here.is_joining = here.was_shut_down = false;
  return *here.agent;
}

std::shared_ptr<Agent> shared_agent() {
  Process& here = process();
  const std::lock_guard lock(here.mutex);
  return agent_of(here);
}

Agent& agent() {
  return *shared_agent();
}

void shutdown(std::chrono::milliseconds timeout) {
  Process& here = process();
  // Declared before the lock, so both are destroyed without the mutex.
  std::shared_ptr<Agent> ended;
  comm::Group group;
  {
    const std::lock_guard lock(here.mutex);
    if (here.agent == nullptr && here.was_shut_down) return;
    ended = agent_of(here);
  }
  ended->shutdown(base::Deadline(timeout));
  const std::lock_guard lock(here.mutex);
  if (here.agent != ended) return;  // another thread came first, and init_rpc() may have made the next one
  here.agent.reset();
  here.was_shut_down = true;
  group = std::move(here.group);
}

at::Tensor shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return shared_agent()->shared_empty(sizes, options);
}

AgentMetrics metrics() {
  return shared_agent()->metrics();
}

std::vector<WorkerInfo> workers(const std::string& pattern) {
  return shared_agent()->workers(pattern);
}

std::shared_ptr<Reference> make_reference(ObjectValue value, Target::Line line) {
  // A process may have several agents: within a handler the object belongs to the agent that was called.
  AgentState* const of_handler = AgentState::of_handler();
  if (of_handler != nullptr) return of_handler->make_here(std::move(value), line);
  return shared_agent()->state()->make_here(std::move(value), line);
}

}  // namespace cohort::rpc
