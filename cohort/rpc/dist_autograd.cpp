#include "cohort/rpc/dist_autograd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>

#include "cohort/base/error.h"
#include "cohort/rpc/init.h"
#include "cohort/rpc/internal/agent_state.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc::dist_autograd {

Context::Context() : Context(*rpc::shared_agent()) {}

Context::Context(Agent& agent)
    : agent_(agent.state()),
      state_(agent_->contexts().create()),
      scope_(std::make_unique<ContextScope>(state_, CallPath())) {}

Context::~Context() {
  agent_->end_context(state_->id());
}

ContextId Context::id() const {
  return state_->id();
}

void backward(Context& context, const std::vector<at::Tensor>& roots, BackwardOptions options) {
  context.state_->backward(roots, context.scope_->late(), options);
}

Gradients get_gradients(const Context& context) {
  return context.state_->gradients();
}

Gradients get_gradients(ContextId id) {
  AgentState* const agent = AgentState::of_handler();
  if (agent == nullptr) {
    throw UsageError("rpc.context", "the gradients of a context are asked for by its id outside of a handler",
                     "get_gradients(context), or a remote function that takes the id");
  }
  return agent->contexts().find(id)->gradients();
}

void accumulate_into_grad(const Gradients& gradients) {
  const at::NoGradGuard no_grad;
  for (const auto& [leaf, gradient] : gradients) {
    at::Tensor& grad = leaf.mutable_grad();
    if (!grad.defined()) {
      grad = gradient.clone();
    } else if (grad.is_sparse() && !gradient.is_sparse()) {
      grad = at::add(gradient, grad);
    } else {
      grad.add_(gradient);
    }
  }
}

}  // namespace cohort::rpc::dist_autograd
