#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/comm/group.h"
#include "cohort/rpc/agent.h"

/// The agent of a process, as torch.distributed.rpc has one. A program that needs several makes them itself
/// (Agent).
///
///     rpc::init_rpc("trainer/0");                  // under cohort run, torchrun, Slurm or mpirun; or alone
///     at::Tensor x = rpc::rpc_sync<embed>("ps/0", words);
///     rpc::shutdown();
namespace cohort::rpc {

/// How the process's agent is made.
struct RpcOptions {
  AgentOptions agent = {};  ///< passed to Agent(); an empty `host` is filled in for a group
  /// Its ranks are the workers. None: all ranks of the job, as comm::init_process_group() finds them.
  comm::Group group = {};
  /// In place of a group: joins the dynamic group of those that share the store, at any time.
  /// comm::StoreAdapter makes one of a c10d store. The store is not used after the join.
  std::shared_ptr<base::KeyValueStore> store = {};
};

/// Joins the workers. The id of this one is its rank. Collective, but not with RpcOptions::store. Returns the
/// process's agent. Throws: UsageError where this process has one, and for a store beside a group; as Agent()
/// and comm::init_process_group().
Agent& init_rpc(std::string name, RpcOptions options = {});

/// The process's agent, until shutdown() has ended. Throws: UsageError before init_rpc() and after
/// shutdown().
Agent& agent();
/// The same for a thread that may use it while another one calls shutdown(). Throws: as agent().
std::shared_ptr<Agent> shared_agent();

/// Agent::shutdown() of the process's agent, which is gone afterwards. Collective.
/// Threads: any. A second call waits for the end of the first; after shutdown() a further call does nothing.
/// Throws: TimeoutError that names who is missing: the agent stays, and it may be tried again; UsageError
/// before init_rpc().
void shutdown(std::chrono::milliseconds timeout = std::chrono::minutes(10));

/// Agent::metrics() of the process's agent: base::log_info(to_string(rpc::metrics())).
AgentMetrics metrics();

/// Agent::shared_empty() of the process's agent.
at::Tensor shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// The workers whose names match: '*' stands for any text. In the order of their ids.
std::vector<WorkerInfo> workers(const std::string& pattern = "*");

/// Agent::rpc_async(), rpc_sync() and remote() of the process's agent. Throws, besides: UsageError where
/// there is none.
template <auto function, typename... Args>
auto rpc_async(const Target& target, Args&&... args) {
  return shared_agent()->rpc_async<function>(target, std::forward<Args>(args)...);
}
template <auto function, typename... Args>
auto rpc_sync(const Target& target, Args&&... args) {
  return shared_agent()->rpc_sync<function>(target, std::forward<Args>(args)...);
}
template <auto function, typename... Args>
auto remote(const Target& target, Args&&... args) {
  return shared_agent()->remote<function>(target, std::forward<Args>(args)...);
}

}  // namespace cohort::rpc
