#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/future.h"

/// Calls of functions in other processes.
///
///     at::Tensor embed(const at::Tensor& words);
///     COHORT_REMOTE(embed);                              // in a source of all programs
///
///     rpc::Agent agent("trainer/0", rank, world_size, store);
///     rpc::Future<at::Tensor> x = agent.rpc_async<&embed>("ps/0", words);
///     at::Tensor y = agent.rpc_sync<&embed>(rpc::to("ps/1").within(100ms), words);
///     agent.shutdown(base::Deadline(30s));
namespace cohort::rpc {

class AgentState;

/// One of the workers of a job. Several may live in a process. Threads: any.
class Agent {
 public:
  /// Joins the workers of the job: returns once this one is connected with all. `store` is one that all have.
  /// Collective. Throws: UsageError for a name that is taken, empty, longer than 127 bytes, of other
  /// characters than letters, digits and _-:./, or that is a device, or for a negative timeout;
  /// RendezvousError that names who is missing.
  Agent(std::string name, int id, int world_size, base::KeyValueStore& store, AgentOptions options = {});
  /// Joins the dynamic group of a store, or begins it: workers join and leave while others run. Returns once
  /// all that are there list this worker, and may call it. Its id is a number that no other worker of the
  /// group has had. A name is free again once its worker is gone. The store is not used afterwards. Blocking:
  /// one round trip for each worker that is there, and AgentOptions::silence for each whose host has just
  /// died. Throws: UsageError for a name that a worker has, or that Agent() above rejects, and where the
  /// store has a static group; RendezvousError that names who does not answer, or where fewer than
  /// AgentOptions::min_workers come.
  Agent(std::string name, base::KeyValueStore& store, AgentOptions options = {});
  /// Without shutdown() the other workers see a death.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// The name and id that this worker joined with.
  const WorkerInfo& self() const;
  /// Workers whose names match: '*' stands for any text. In the order of their ids. Of a dynamic group: those
  /// that are there now.
  std::vector<WorkerInfo> workers(const std::string& pattern = "*") const;

  /// Calls `function` on a worker, or on this one. The arguments' tensors must stay as they are until the
  /// result is there. One that is moved in is the function's. The result is an error if the function throws
  /// (with its type), if the worker dies (PeerError), or once the time is over (TimeoutError): the earlier of
  /// the target's and, within a handler, what is left of the call that it answers. Throws: UsageError for an
  /// unknown worker, or where the worker has the function with another signature.
  template <auto function, typename... Args>
  auto rpc_async(const Target& target, Args&&... args) {
    using Result = typename FunctionType<decltype(function)>::Returned;
    return Future<Result>(
        call(target, name_of<function>(), encode_arguments<function>(std::forward<Args>(args)...)));
  }
  /// Calls a function on a worker and blocks for its result. Throws: as rpc_async(); what the function threw
  /// there.
  template <auto function, typename... Args>
  auto rpc_sync(const Target& target, Args&&... args) {
    return rpc_async<function>(target, std::forward<Args>(args)...).get();
  }

  /// Returns a reference to the result of a function that runs on a worker, at once. The result stays there.
  /// What the function throws is thrown by whoever uses the reference. It has as long as it needs, or as
  /// target.within() says; if the result is not there by then, each use throws TimeoutError. Throws: as
  /// rpc_async().
  template <auto function, typename... Args>
  auto remote(const Target& target, Args&&... args) {
    using Returned = typename FunctionType<decltype(function)>::Returned;
    return RRef<Kept<Returned>>(
        make(target, name_of<function>(), encode_arguments<function>(std::forward<Args>(args)...)));
  }
  /// A reference to an object of this worker.
  template <typename T>
  auto make_rref(T object, Target::Line line = Target::Line::current()) {
    return RRef<Kept<T>>(make_here(make_object_value(std::move(object)), line));
  }

  /// Waits until all workers have come here and every call is answered, also those that handlers make and do
  /// not wait for, and leaves. Calls of others are answered meanwhile. After this worker has left, a further
  /// call does nothing. Collective. In a dynamic group it waits for nobody to come here: it leaves once the
  /// calls that this worker made are answered, and those that others have made to it. Others that call it
  /// meanwhile get PeerError. Threads: any. A second call first waits for the end of the first, by its own
  /// deadline. Throws: TimeoutError that names who has not come, and what this one waits for.
  void shutdown(base::Deadline deadline);

  /// The timeout of calls that have none of their own; zero: they have none.
  std::chrono::milliseconds timeout() const;
  /// Changes it for calls that begin later. Throws: UsageError for a negative one. Threads: any.
  void set_timeout(std::chrono::milliseconds timeout);

  /// A tensor on the CPU, not set, whose memory the workers of this host can have without a copy: of 64 KiB
  /// or more, it is not copied where it is moved into a call, or a function returns the only one that holds
  /// it. Where there is no such memory it is an ordinary tensor. It may outlive the agent. Threads: any.
  /// Throws: UsageError for a device or layout of another kind.
  at::Tensor shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  /// What this worker has sent and handled, and what it keeps, now. To count costs a call less than a
  /// microsecond.
  AgentMetrics metrics() const;

  /// For this module.
  const std::shared_ptr<AgentState>& state() const { return state_; }

 private:
  base::Future<Encoded> call(const Target& target, const char* function, Encoded arguments);
  std::shared_ptr<Reference> make(const Target& target, const char* function, Encoded arguments);
  std::shared_ptr<Reference> make_here(ObjectValue value, Target::Line line);

  std::shared_ptr<AgentState> state_;
};

}  // namespace cohort::rpc
