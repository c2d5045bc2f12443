#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/core/random_scope.h"
#include "cohort/rpc/backward_options.h"
#include "cohort/rpc/context_id.h"

/// Gradients through remote calls.
///
///     rpc::dist_autograd::Context context;                    // or Context context(agent)
///     at::Tensor x = rpc::rpc_sync<embed>("ps/0", words);     // recorded here and there
///     rpc::dist_autograd::backward(context, {loss(decoder(x))});
///     for (auto& [leaf, gradient] : rpc::dist_autograd::get_gradients(context)) ...
///
/// On another worker a handler takes the gradients there: get_gradients(id), with id = context.id() as an
/// argument.
///
/// A context records the calls that this thread makes while it lives and gradients are on, and the calls that
/// their handlers make: rpc_sync, rpc_async, remote, to_here, and make_rref of a tensor that was computed. So
/// an object's gradient is the sum over all who fetched its value, or used it where it lies, and continues to
/// the arguments of the call that made it. A handler that answers later gives results, and objects, without a
/// gradient.
namespace cohort::rpc {

class Agent;
class AgentState;
class ContextScope;
class ContextState;
class DistributedOptimizer;
class SeedScope;
template <typename T>
class RRef;

namespace dist_autograd {

/// What can be chosen of a context.
struct ContextOptions {
  /// With a key, what random operators draw on the CPU in handlers of the context's calls, also of nested
  /// ones, is a function of the key and of the call's place in the program. Without a key they draw from
  /// their process's generator.
  std::optional<core::RandomKey> random = {};
};

/// Of each leaf of this worker that was used: its gradient, summed in an order that is the same in each run.
using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// Records calls while it lives. Its end frees what all workers keep for it. Threads: the one that made it.
/// One backward of a context at a time: where one fails, those that began before it fail too.
class Context {
 public:
  explicit Context(const ContextOptions& options = {});  ///< of the process's agent
  explicit Context(Agent& agent, const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// The context's number, by which workers and functions of this module refer to it.
  ContextId id() const;

 private:
  friend void backward(Context&, const std::vector<at::Tensor>&, BackwardOptions);
  friend Gradients get_gradients(const Context&);
  friend void accumulate_into_grad(const Context&);
  friend DistributedOptimizer;
  const std::shared_ptr<AgentState> agent_;
  const std::shared_ptr<ContextState> state_;
  const std::unique_ptr<ContextScope> scope_;
  const std::unique_ptr<SeedScope> seeds_;
};

/// Goes backward from the roots (losses of one number each), through all workers. Gradients stay in the
/// context, and add up over several backwards. Results that the roots do not use cost nothing. Blocking: also
/// until calls that this thread has made in the context, and not waited for, have their answers or have
/// failed, as they may make objects. Throws: UsageError for a root without a gradient, or a graph that is
/// gone without `keep_graph`; what a worker threw, with worker and call; PeerError for one that died.
void backward(Context& context, const std::vector<at::Tensor>& roots, BackwardOptions options = {});
/// The same from a loss that lies on any worker, which this thread fetches. Throws, besides: as RRef.
template <std::same_as<at::Tensor> T>
void backward(Context& context, const RRef<T>& root, BackwardOptions options = {}) {
  backward(context, {root.to_here()}, options);
}

/// The gradients of this worker's leaves.
Gradients get_gradients(const Context& context);
/// The same, in a handler: of the worker that it runs on. Throws: UsageError where no call of the context
/// came.
Gradients get_gradients(ContextId id);
/// Adds them to the grad() of each leaf, so that any optimizer can take its step. Hooks do not run.
void accumulate_into_grad(const Gradients& gradients);
/// Adds the gradients of this worker's leaves to their grad(). Hooks of leaves that calls used run, and so do
/// those of their gradient accumulators: once, with the sum over all calls. The gradients stay in the context
/// too. Throws: what a hook throws.
void accumulate_into_grad(const Context& context);
/// The same, in a handler: of the worker that it runs on. Throws, besides: UsageError where no call of the
/// context came.
void accumulate_into_grad(ContextId id);

}  // namespace dist_autograd
}  // namespace cohort::rpc
