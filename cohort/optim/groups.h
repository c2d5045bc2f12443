#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Parameter groups: which parameters an optimizer steps, and with what options.
///
///     auto named = cohort::optim::named_parameters(*model);
///     cohort::optim::SGD sgd(cohort::optim::split_decay(named, 5e-4),
///                            cohort::optim::SGDOptions(0.1).momentum(0.9));
///     sgd.param_groups()[1].lr = 0.01;
namespace cohort::optim {

/// An option of a group with this value takes the optimizer's own when the optimizer is made.
inline constexpr double kInherit = std::numeric_limits<double>::quiet_NaN();

/// Parameters that share options. Once an optimizer holds it every option has a value; `lr`, `momentum` and
/// the rest may be changed between steps, `params` may not.
struct ParamGroup {
  /// Leaves whose gradients a step reads and whose values it changes.
  std::vector<at::Tensor> params = {};
  std::string name = {};         ///< for messages and logs; may be empty
  double lr = kInherit;          ///< in use at the next step
  double initial_lr = kInherit;  ///< what schedules scale; set from `lr`
  double weight_decay = kInherit;
  double momentum = kInherit;         ///< SGD
  double dampening = kInherit;        ///< SGD
  double beta1 = kInherit;            ///< Adam, AdamW
  double beta2 = kInherit;            ///< Adam, AdamW
  double eps = kInherit;              ///< Adam, AdamW
  std::optional<bool> nesterov = {};  ///< SGD
  std::optional<bool> amsgrad = {};   ///< Adam, AdamW
  /// Whether a step goes up the gradient instead of down.
  std::optional<bool> maximize = {};
};

/// Parameters with their names, as named_parameters() of a module lists them.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Returns names and parameters of a torch::nn::Module (a template, so that this header does not need it).
template <typename Module>
NamedTensors named_parameters(const Module& module) {
  NamedTensors named;
  for (const auto& item : module.named_parameters()) named.emplace_back(item.key(), item.value());
  return named;
}

/// Returns two groups, `decay` (with `weight_decay`) and `no_decay` (0): parameters of one dimension (biases,
/// weights of norms) and those whose name ends in "bias" are not decayed. A group that would be empty is left
/// out.
std::vector<ParamGroup> split_decay(const NamedTensors& parameters, double weight_decay);

}  // namespace cohort::optim
