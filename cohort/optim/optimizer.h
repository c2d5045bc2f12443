#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/optim/finite.h"
#include "cohort/optim/groups.h"

/// What every optimizer is: groups of parameters, a step, and a state that can be saved.
///
/// A user's own optimizer derives from Optimizer, says which options and which tensors per parameter it has,
/// and writes step(); saving, loading and checking come from here:
///
///     class SignSGD : public cohort::optim::Optimizer {
///      public:
///       SignSGD(std::vector<cohort::optim::ParamGroup> groups, double lr) : Optimizer(std::move(groups)) {
///         fill_options({.lr = lr});  // for each group that leaves lr open
///       }
///       std::string type() const override { return "sign_sgd"; }
///       void step() override {
///         at::NoGradGuard no_grad;
///         for (auto& group : param_groups())
///           for (auto& p : group.params)
///             if (p.grad().defined()) p.add_(p.grad().sign(), -group.lr);
///       }
///     };
namespace cohort::optim {

/// An optimizer's state by name. `state.K.exp_avg` belongs to the K-th parameter, counted through all groups
/// in order, as in a state_dict of PyTorch; `group.G.lr` is an option of group G (true is 1).
struct OptimizerState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, double> scalars;
};

/// What an optimizer remembers of one parameter.
struct ParamState {
  std::int64_t step = 0;            ///< steps this parameter took part in
  std::vector<at::Tensor> tensors;  ///< as Optimizer::state_names(); undefined until first used
};

/// An option of a group that is saved and loaded with the state.
struct GroupOption {
  const char* name;                                 ///< as ParamGroup has it, and the state's `group.G.NAME`
  double ParamGroup::*number = nullptr;             ///< either this
  std::optional<bool> ParamGroup::*flag = nullptr;  ///< or this
};

/// Threads: one caller at a time. Ownership: shares the parameters, never copies them.
class Optimizer {
 public:
  /// Throws: UsageError for no parameters, or one that is undefined, not a leaf, not floating point, or given
  /// twice.
  explicit Optimizer(std::vector<ParamGroup> groups);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every parameter that has a gradient; others are skipped, and so are their states.
  virtual void step() = 0;
  /// The same, unless `found` says that a gradient is not finite: then parameters and state stay as they are.
  /// SGD, Adam and AdamW do not wait for an accelerator to know; an optimizer that does not override this
  /// does.
  virtual void step_unless(const NonFinite& found);
  /// The optimizer's name: "sgd", "adam", "adamw".
  virtual std::string type() const = 0;
  /// Bytes of state that a step of `group` keeps for `parameter`: as many tensors of its size as a step uses.
  virtual std::int64_t state_bytes(const ParamGroup& group, const at::Tensor& parameter) const {
    return static_cast<std::int64_t>(states_used(group) * parameter.nbytes());
  }

  /// True if it has the option `name` of a group: lr, initial_lr, or one of group_options().
  bool has_option(std::string_view name) const;

  /// Drops the gradients, or fills them with zero where `set_to_none` is false.
  void zero_grad(bool set_to_none = true);

  /// The groups, whose options may be changed between steps.
  std::vector<ParamGroup>& param_groups() { return groups_; }
  const std::vector<ParamGroup>& param_groups() const { return groups_; }
  /// Returns the parameters of all groups, in their order.
  std::vector<at::Tensor> parameters() const;

  /// Sets the learning rate of every group, for the next step. A schedule sets it anew from `initial_lr`.
  /// Throws: UsageError for a rate that is negative or not finite.
  void set_lr(double lr);
  /// Sets momentum (SGD) or beta1 (Adam, AdamW) of every group. Throws: UsageError if there is none.
  virtual void set_momentum(double momentum);

  /// Returns the state under the names that PyTorch's own optimizers use. The tensors alias the live state:
  /// clone them to keep them past the next step. Blocking: until it is known whether the last step was made.
  OptimizerState state();
  /// Takes over a state that state() returned: tensors are copied, options set.
  /// Throws: DataError listing every name and shape that does not fit; nothing has changed then.
  void load_state(const OptimizerState& state);

 protected:
  /// Names of the tensors kept per parameter, for instance {"exp_avg", "exp_avg_sq"}.
  virtual std::vector<std::string> state_names() const { return {}; }
  /// True if a parameter's step count is saved (`state.K.step`).
  virtual bool saves_step() const { return false; }
  /// Options of a group that step() reads. They are saved; `lr` and `initial_lr` always are.
  virtual std::vector<GroupOption> group_options() const { return {}; }
  /// How many of state_names(), from the first on, a step of `group` uses; loading expects these.
  virtual std::size_t states_used(const ParamGroup& /*group*/) const { return state_names().size(); }
  /// The optimizer calls it before the state is read. It brings up to date what was not known yet.
  virtual void synchronize_state() {}
  /// The optimizer calls it after load_state.
  virtual void state_loaded() {}

  /// State of the `index`-th parameter of group `group`; its tensors have as many entries as state_names().
  ParamState& param_state(std::size_t group, std::size_t index) { return states_[group][index]; }

  /// Gives options that a group left open the values of `defaults`. For constructors.
  void fill_options(const ParamGroup& defaults);

 private:
  class Mismatches;
  std::vector<GroupOption> all_options() const;
  void load_options(const OptimizerState& state, std::vector<ParamGroup>& groups,
                    Mismatches& mismatches) const;
  ParamState load_parameter(const OptimizerState& state, const std::string& prefix,
                            const at::Tensor& parameter, std::size_t needed, std::set<std::string>& used,
                            Mismatches& mismatches) const;

  std::vector<ParamGroup> groups_;
  std::vector<std::vector<ParamState>> states_;
};

}  // namespace cohort::optim
