// State is named by the number of the parameter, counted through all groups, and options by the number of the
// group. load_state() builds the new groups and states beside the old, and collects whatever does not fit.
// They replace the old only if nothing was found: an error changes nothing, and lists everything.
#include "cohort/optim/optimizer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <unordered_set>

#include "cohort/base/error.h"

namespace cohort::optim {
namespace {

using base::concat;

/// An option of a group that fill_options() fills, and whose it is among Cohort's own optimizers.
struct NumberToFill {
  const char* name;
  double ParamGroup::*value;
  const char* hint = "";
};
struct FlagToFill {
  const char* name;
  std::optional<bool> ParamGroup::*value;
  const char* hint = "";
};

constexpr const char* kOfSgd = "it belongs to sgd; ";
constexpr const char* kOfAdam = "it belongs to adam and adamw; ";
constexpr NumberToFill kNumbersToFill[] = {{"lr", &ParamGroup::lr},
                                           {"weight_decay", &ParamGroup::weight_decay},
                                           {"momentum", &ParamGroup::momentum, kOfSgd},
                                           {"dampening", &ParamGroup::dampening, kOfSgd},
                                           {"beta1", &ParamGroup::beta1, kOfAdam},
                                           {"beta2", &ParamGroup::beta2, kOfAdam},
                                           {"eps", &ParamGroup::eps, kOfAdam}};
constexpr FlagToFill kFlagsToFill[] = {{"nesterov", &ParamGroup::nesterov, kOfSgd},
                                       {"amsgrad", &ParamGroup::amsgrad, kOfAdam},
                                       {"maximize", &ParamGroup::maximize}};

void check_parameter(const at::Tensor& parameter, const std::string& where) {
  const char* hint = "give the parameters of a module, as module->parameters() returns them";
  if (!parameter.defined()) throw UsageError("optim", concat(where, " is an undefined tensor"), hint);
  // The gradient of a tensor that was computed is not kept, so it would never be stepped.
  if (!parameter.is_leaf())
    throw UsageError("optim", concat(where, " is not a leaf: it was computed from other tensors"), hint);
  if (!at::isFloatingType(parameter.scalar_type()))
    throw UsageError("optim",
                     concat(where, " has dtype ", parameter.scalar_type(), ", expected floating point"),
                     "step the view_as_real of a complex parameter; leave integer tensors out");
  if (parameter.layout() != at::kStrided)
    throw UsageError("optim", concat(where, " has layout ", parameter.layout(), ", expected strided"), hint);
}

std::string parameter_place(const ParamGroup& group, std::size_t g, std::size_t index) {
  return concat("parameter ", index, " of group ", g,
                group.name.empty() ? "" : concat(" (", group.name, ")"));
}

double read_option(const ParamGroup& group, const GroupOption& option) {
  return option.number ? group.*option.number : ((group.*option.flag).value_or(false) ? 1.0 : 0.0);
}

}  // namespace

/// Collects what does not fit, so that one message lists it all.
class Optimizer::Mismatches {
 public:
  void add(const std::string& line) {
    if (++count_ <= 20) text_ += "\n  " + line;
  }
  void check(const std::string& type) const {
    if (count_ == 0) return;
    std::string text = text_;
    if (count_ > 20) text += concat("\n  and ", count_ - 20, " more");
    throw DataError("optim.load_state", concat("the state does not fit this ", type, " optimizer:", text),
                    "load it into an optimizer of the same type with the same groups and parameters");
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
};

Optimizer::Optimizer(std::vector<ParamGroup> groups) : groups_(std::move(groups)) {
  std::unordered_set<const void*> seen;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    ParamGroup& group = groups_[g];
    for (std::size_t i = 0; i < group.params.size(); ++i) {
      const std::string where = parameter_place(group, g, i);
      check_parameter(group.params[i], where);
      // A parameter in two groups would be stepped twice. Identity counts, not equal values.
      if (!seen.insert(group.params[i].unsafeGetTensorImpl()).second)
        throw UsageError("optim", concat(where, " was given before"),
                         "give every parameter once, in one group");
    }
    // Schedules multiply initial_lr, so lr itself can be set anew at each step. A group without an lr of its
    // own gets both from fill_options().
    if (std::isnan(group.initial_lr)) group.initial_lr = group.lr;
    states_.emplace_back(group.params.size());
  }
  if (seen.empty())
    throw UsageError("optim", "there are no parameters", "give the parameters of a module that has some");
}

void Optimizer::zero_grad(bool set_to_none) {
  c10::NoGradGuard no_grad;
  for (ParamGroup& group : groups_) {
    for (at::Tensor& parameter : group.params) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        // After backward with create_graph a gradient has a graph, and zeroing it in place would be recorded.
        if (gradient.grad_fn()) gradient = gradient.detach();
        gradient.zero_();
      }
    }
  }
}

std::vector<at::Tensor> Optimizer::parameters() const {
  std::vector<at::Tensor> all;
  for (const ParamGroup& group : groups_) all.insert(all.end(), group.params.begin(), group.params.end());
  return all;
}

void Optimizer::set_lr(double lr) {
  if (!std::isfinite(lr) || lr < 0)
    throw UsageError("optim.set_lr", concat("got ", lr, ", expected 0 or more, and finite"));
  for (ParamGroup& group : groups_) group.lr = lr;
}

void Optimizer::set_momentum(double) {
  throw UsageError("optim.set_momentum", concat("the optimizer ", type(), " has no momentum"),
                   "a one-cycle schedule with cycle_momentum: false");
}

void Optimizer::fill_options(const ParamGroup& defaults) {
  for (ParamGroup& group : groups_) {
    const auto reject = [&](const auto& option) {
      throw UsageError(
          "optim",
          concat("group \"", group.name, "\" sets ", option.name, ", which ", type(), " does not have"),
          concat(option.hint,
                 "in an optimizer of your own, name it in group_options(), and give it a value in "
                 "fill_options()"));
    };
    // NaN means "not set" for numbers, an empty optional for flags. In `defaults` it says that the optimizer
    // has no such option.
    for (const NumberToFill& option : kNumbersToFill) {
      if (std::isnan(group.*option.value)) {
        group.*option.value = defaults.*option.value;
      } else if (std::isnan(defaults.*option.value)) {
        reject(option);
      }
    }
    for (const FlagToFill& option : kFlagsToFill) {
      if (!(group.*option.value)) {
        group.*option.value = defaults.*option.value;
      } else if (!(defaults.*option.value)) {
        reject(option);
      }
    }
    if (std::isnan(group.initial_lr)) group.initial_lr = group.lr;
  }
  // Slots for all state tensors, also those that no step uses now: an option may be switched on later.
  const std::size_t names = state_names().size();
  for (auto& states : states_)
    for (ParamState& state : states) state.tensors.resize(names);
}

bool Optimizer::has_option(std::string_view name) const {
  return std::ranges::any_of(all_options(), [&](const GroupOption& option) { return option.name == name; });
}

std::vector<GroupOption> Optimizer::all_options() const {
  std::vector<GroupOption> options = group_options();
  options.push_back({"lr", &ParamGroup::lr});
  options.push_back({"initial_lr", &ParamGroup::initial_lr});
  return options;
}

void Optimizer::step_unless(const NonFinite& found) {
  if (!found.any()) step();
}

OptimizerState Optimizer::state() {
  // A step on an accelerator may still have to be taken back, which changes counts and tensors.
  synchronize_state();
  OptimizerState result;
  const std::vector<std::string> names = state_names();
  std::size_t flat = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const GroupOption& option : all_options())
      result.scalars[concat("group.", g, ".", option.name)] = read_option(groups_[g], option);
    result.scalars[concat("group.", g, ".num_params")] = static_cast<double>(groups_[g].params.size());
    for (const ParamState& state : states_[g]) {
      const std::string prefix = concat("state.", flat++, ".");
      for (std::size_t n = 0; n < state.tensors.size(); ++n)
        // The optimizer shares it, and it is not copied: who keeps it over the next step copies it.
        if (state.tensors[n].defined()) result.tensors[prefix + names[n]] = state.tensors[n].detach();
      if (saves_step() && state.step > 0)
        result.tensors[prefix + "step"] =
            at::scalar_tensor(static_cast<double>(state.step), at::TensorOptions(at::kFloat));
    }
  }
  return result;
}

void Optimizer::load_state(const OptimizerState& state) {
  c10::NoGradGuard no_grad;
  Mismatches mismatches;
  // A copy to work on. The tensors in it are the same, and nothing below writes to them.
  std::vector<ParamGroup> groups = groups_;
  load_options(state, groups, mismatches);
  std::vector<std::vector<ParamState>> states;
  std::set<std::string> used;
  for (std::size_t g = 0, flat = 0; g < groups.size(); ++g) {
    states.emplace_back();
    for (const at::Tensor& parameter : groups[g].params)
      states.back().push_back(load_parameter(state, concat("state.", flat++, "."), parameter,
                                             states_used(groups[g]), used, mismatches));
  }
  for (const auto& [name, tensor] : state.tensors)
    if (!used.count(name)) mismatches.add(concat(name, ": not a part of this optimizer"));
  mismatches.check(type());
  groups_ = std::move(groups);
  states_ = std::move(states);
  state_loaded();
}

void Optimizer::load_options(const OptimizerState& state, std::vector<ParamGroup>& groups,
                             Mismatches& mismatches) const {
  std::set<std::string> used;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    auto number = [&](const char* option) -> const double* {
      const std::string name = concat("group.", g, ".", option);
      const auto found = state.scalars.find(name);
      used.insert(name);
      if (found != state.scalars.end()) return &found->second;
      mismatches.add(name + ": missing");
      return nullptr;
    };
    for (const GroupOption& option : all_options()) {
      const double* value = number(option.name);
      if (!value) continue;
      if (option.number) {
        groups[g].*option.number = *value;
      } else {
        groups[g].*option.flag = *value != 0;
      }
    }
    const double* count = number("num_params");
    if (count && *count != static_cast<double>(groups[g].params.size()))
      mismatches.add(
          concat("group.", g, ".num_params: got ", *count, ", expected ", groups[g].params.size()));
  }
  for (const auto& [name, value] : state.scalars)
    if (!used.count(name)) mismatches.add(concat(name, ": not a part of this optimizer"));
}

// A parameter has no state at all, or everything that a step uses.
ParamState Optimizer::load_parameter(const OptimizerState& state, const std::string& prefix,
                                     const at::Tensor& parameter, std::size_t needed,
                                     std::set<std::string>& used, Mismatches& mismatches) const {
  const std::vector<std::string> names = state_names();
  ParamState result;
  result.tensors.resize(names.size());
  std::vector<std::string> missing;
  bool any = false;
  auto find = [&](const std::string& name, bool expected) -> const at::Tensor* {
    const auto found = state.tensors.find(prefix + name);
    if (found == state.tensors.end()) {
      if (expected) missing.push_back(prefix + name);
      return nullptr;
    }
    any = true;
    used.insert(prefix + name);
    return &found->second;
  };
  for (std::size_t n = 0; n < names.size(); ++n) {
    const at::Tensor* tensor = find(names[n], n < needed);
    if (!tensor) continue;
    if (tensor->sizes() != parameter.sizes()) {
      mismatches.add(
          concat(prefix, names[n], ": got shape ", tensor->sizes(), ", expected ", parameter.sizes()));
      continue;
    }
    // A copy in the parameter's type, device and layout: kernels want them equal, and a checkpoint that is
    // mapped into memory must not be written to.
    result.tensors[n] = at::empty_like(parameter);
    result.tensors[n].copy_(*tensor);
  }
  if (saves_step()) {
    const at::Tensor* step = find("step", true);
    if (step && step->numel() == 1) {
      result.step = static_cast<std::int64_t>(step->item<double>());
    } else if (step) {
      mismatches.add(concat(prefix, "step: got shape ", step->sizes(), ", expected one number"));
    }
  }
  // A parameter that never had a gradient has no state; that is no mismatch.
  if (any)
    for (const std::string& name : missing) mismatches.add(name + ": missing");
  return result;
}

}  // namespace cohort::optim
