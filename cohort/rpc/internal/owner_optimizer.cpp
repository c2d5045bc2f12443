// A parameter's grad() belongs to whoever else trains it here, or accumulates into it, at any time. So the
// optimizer has tensors of its own with the memory of the parameters, and a step puts the context's gradients
// there. One lock for the process: parameters may belong to optimizers of several trainers.
#include "cohort/rpc/internal/owner_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/handler_scope.h"
#include "cohort/rpc/internal/parameters_mutex.h"

namespace cohort::rpc {
namespace {

// What travels of OptimizerOptions and OptimizerState. Signatures describe these types: a program with
// another field has another signature.
using Number = std::optional<double>;
using Flag = std::optional<bool>;
using OptionFields = std::tuple<std::string, Number, Number, Number, Number, Flag, Number, Number, Number,
                                Flag, Flag, base::NamedOptions::Map>;
using StateFields = std::tuple<std::map<std::string, at::Tensor>, std::map<std::string, double>>;

// A tensor with the memory of each parameter, and a grad() of its own. What an optimizer rejects stays
// itself; a parameter that stands there twice has one.
std::vector<at::Tensor> with_own_grad(const std::vector<at::Tensor>& parameters) {
  std::unordered_map<const void*, at::Tensor> made;
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& own = made[parameter.unsafeGetTensorImpl()];
    const bool is_rejected =
        !parameter.defined() || !parameter.is_leaf() || !at::isFloatingType(parameter.scalar_type());
    if (is_rejected) {
      own = parameter;
    } else if (!own.defined()) {
      own = parameter.detach().requires_grad_(parameter.requires_grad());
    }
    all.push_back(own);
  }
  return all;
}

bool have_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// What the optimizer steps, while it does: with the gradients of a context.
class TensorsOfStep {
 public:
  TensorsOfStep(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& own,
                const dist_autograd::Gradients& gradients)
      : parameters_(parameters), own_(own) {
    std::unordered_map<const void*, at::Tensor> found;
    for (const auto& [leaf, gradient] : gradients) found.emplace(leaf.unsafeGetTensorImpl(), gradient);
    for (std::size_t i = 0; i < own.size(); ++i) {
      // set_data() of a parameter, as by Module::to(), gives it other memory.
      if (!have_same_memory(own[i], parameters[i])) own[i].set_data(parameters[i].detach());
      const auto gradient = found.find(parameters[i].unsafeGetTensorImpl());
      if (gradient != found.end()) own[i].mutable_grad() = gradient->second;
      versions_.push_back({parameters[i]._version(), own[i]._version()});
    }
  }
  ~TensorsOfStep() {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      own_[i].mutable_grad().reset();
      // Autograd is to see that the parameter has changed. As a rule both have one version counter.
      const bool has_changed = own_[i]._version() != versions_[i].own;
      if (!has_changed || parameters_[i]._version() != versions_[i].of_parameter) continue;
      parameters_[i].unsafeGetTensorImpl()->bump_version();
    }
  }
  TensorsOfStep(const TensorsOfStep&) = delete;
  TensorsOfStep& operator=(const TensorsOfStep&) = delete;

 private:
  struct Versions {
    std::int64_t of_parameter, own;
  };
  const std::vector<at::Tensor>&parameters_, &own_;
  std::vector<Versions> versions_;
};

}  // namespace

void Codec<optim::OptimizerOptions>::write(Writer& out, const optim::OptimizerOptions& value) {
  // Names all fields: one more does not compile.
  const auto& [name, lr, decay, momentum, dampening, nesterov, beta1, beta2, eps, amsgrad, maximize, extra] =
      value;
  encode(out, OptionFields(name, lr, decay, momentum, dampening, nesterov, beta1, beta2, eps, amsgrad,
                           maximize, base::NamedOptions::Map(extra.begin(), extra.end())));
}
optim::OptimizerOptions Codec<optim::OptimizerOptions>::read(Reader& in) {
  auto [name, lr, decay, momentum, dampening, nesterov, beta1, beta2, eps, amsgrad, maximize, extra] =
      decode<OptionFields>(in);
  return {std::move(name), lr,    decay, momentum, dampening, nesterov,
          beta1,           beta2, eps,   amsgrad,  maximize,  std::move(extra)};
}
void Codec<optim::OptimizerOptions>::describe(TypeText& text) {
  text.add("OptimizerOptions ");
  Codec<OptionFields>::describe(text);
}

void Codec<optim::OptimizerState>::write(Writer& out, const optim::OptimizerState& value) {
  const auto& [tensors, scalars] = value;
  encode(out, StateFields(tensors, scalars));
}
optim::OptimizerState Codec<optim::OptimizerState>::read(Reader& in) {
  auto [tensors, scalars] = decode<StateFields>(in);
  return {std::move(tensors), std::move(scalars)};
}
void Codec<optim::OptimizerState>::describe(TypeText& text) {
  text.add("OptimizerState ");
  Codec<StateFields>::describe(text);
}

OwnerOptimizer::OwnerOptimizer(std::vector<at::Tensor> parameters, const optim::OptimizerOptions& options)
    : parameters_(std::move(parameters)),
      own_(with_own_grad(parameters_)),
      optimizer_(optim::make_optimizer(options, {{.params = own_}})) {}

void OwnerOptimizer::step(dist_autograd::ContextId context, std::optional<double> lr,
                          std::optional<double> momentum) {
  const std::shared_ptr<ContextState> state = HandlerScope::agent()->contexts.find_if_here(context);
  const dist_autograd::Gradients gradients =
      state != nullptr ? state->gradients() : dist_autograd::Gradients();
  const std::lock_guard lock(parameters_mutex());
  if (lr) optimizer_->set_lr(*lr);
  if (momentum) optimizer_->set_momentum(*momentum);
  const TensorsOfStep tensors(parameters_, own_, gradients);
  optimizer_->step();
}

double OwnerOptimizer::initial_lr() const {
  return optimizer_->param_groups().front().initial_lr;
}

optim::OptimizerState OwnerOptimizer::state() const {
  const std::lock_guard lock(parameters_mutex());
  optim::OptimizerState state = optimizer_->state();
  // They alias what the next step changes, and travel after this.
  for (auto& [name, tensor] : state.tensors) tensor = tensor.clone();
  return state;
}

void OwnerOptimizer::load_state(const optim::OptimizerState& state) {
  const std::lock_guard lock(parameters_mutex());
  optimizer_->load_state(state);
}

std::shared_ptr<OwnerOptimizer> make_owner_optimizer(const std::vector<RRef<at::Tensor>>& parameters,
                                                     const optim::OptimizerOptions& options) {
  std::vector<at::Tensor> own;
  for (const RRef<at::Tensor>& parameter : parameters) own.push_back(*parameter.local_value());
  return std::make_shared<OwnerOptimizer>(std::move(own), options);
}

}  // namespace cohort::rpc

// At this scope their names are "rpc::...".
namespace cohort {
COHORT_REMOTE(rpc::make_owner_optimizer);
COHORT_REMOTE(rpc::OwnerOptimizer::step);
COHORT_REMOTE(rpc::OwnerOptimizer::initial_lr);
COHORT_REMOTE(rpc::OwnerOptimizer::state);
COHORT_REMOTE(rpc::OwnerOptimizer::load_state);
}  // namespace cohort
