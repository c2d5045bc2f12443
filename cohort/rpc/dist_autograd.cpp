// A Context is a scope of this thread: calls that it makes are recorded in the ContextState of the agent.
// backward() runs LibTorch's engine over the program's own graph, and the nodes of recorded calls
// (gradient_nodes.h) have the workers go backward. Always: gradients of calls stay in the context, each under
// its part, and are added in one order when somebody asks. With into_grad the engine adds those of the
// program's own leaves to grad() itself, so that hooks and DDP run as ever.
#include "cohort/rpc/dist_autograd.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/base/timeline.h"
#include "cohort/rpc/init.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc::dist_autograd {
namespace {

using Of = ContextState::Of;

std::optional<std::uint64_t> seed_of(const ContextOptions& options) {
  if (!options.random) return std::nullopt;
  return options.random->generator_seed();
}

// Adds gradients of calls to grad() as a local backward does it. Hooks of the program's own leaves have run
// in its backward.
void accumulate_with_hooks(ContextState& context) {
  accumulate_into_grad(context.gradients(Of::kProgram));
  std::vector<torch::autograd::Edge> edges;
  std::vector<at::Tensor> sums;
  for (const auto& [leaf, gradient] : context.gradients(Of::kCalls)) {
    torch::autograd::Edge edge = autograd::edge_of(leaf);
    if (!edge.is_valid()) continue;  // somebody has switched its gradient off meanwhile
    edges.push_back(std::move(edge));
    sums.push_back(gradient);
  }
  if (edges.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(edges, sums, /*keep_graph=*/false,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true);
}

// In a handler: of the worker that it runs on.
std::shared_ptr<ContextState> context_of_handler(ContextId id) {
  AgentState* const agent = AgentState::of_handler();
  if (agent != nullptr) return agent->contexts().find(id);
  throw UsageError("rpc.context", "the gradients of a context are asked for by its id outside of a handler",
                   "the context itself, or a remote function that takes the id");
}

}  // namespace

Context::Context(const ContextOptions& options) : Context(*rpc::shared_agent(), options) {}

Context::Context(Agent& agent, const ContextOptions& options)
    : agent_(agent.state()),
      state_(agent_->contexts().create()),
      scope_(std::make_unique<ContextScope>(state_, CallPath())),
      seeds_(std::make_unique<SeedScope>(seed_of(options))) {}

Context::~Context() {
  agent_->end_context(state_->id());
}

ContextId Context::id() const {
  return state_->id();
}

void backward(Context& context, const std::vector<at::Tensor>& roots, BackwardOptions options) {
  const base::TimelineScope span("rpc::backward");
  context.state_->backward(roots, context.scope_->late(), options);
}

Gradients get_gradients(const Context& context) {
  return context.state_->gradients();
}

Gradients get_gradients(ContextId id) {
  return context_of_handler(id)->gradients();
}

void accumulate_into_grad(const Gradients& gradients) {
  const at::NoGradGuard no_grad;
  for (const auto& [leaf, gradient] : gradients) {
    at::Tensor& grad = leaf.mutable_grad();
    if (!grad.defined()) {
      grad = gradient.clone();
    } else if (grad.is_sparse() && !gradient.is_sparse()) {
      grad = autograd::sum_of(grad, gradient);
    } else {
      grad.add_(gradient);
    }
  }
}

void accumulate_into_grad(const Context& context) {
  accumulate_with_hooks(*context.state_);
}

void accumulate_into_grad(ContextId id) {
  accumulate_with_hooks(*context_of_handler(id));
}

}  // namespace cohort::rpc::dist_autograd
