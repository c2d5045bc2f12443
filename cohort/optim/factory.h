#pragma once

#include <functional>
#include <memory>

#include "cohort/base/registry.h"
#include "cohort/base/text/named_options.h"
#include "cohort/optim/optimizer.h"

/// Optimizers by name: Cohort's, and those that a program or a library given to `--load` registers.
///
///     COHORT_REGISTER_OPTIMIZER("sign_sgd", [](const cohort::optim::OptimizerOptions& options,
///                                              std::vector<cohort::optim::ParamGroup> groups) {
///       return std::make_unique<SignSGD>(std::move(groups), options.lr.value_or(0.01));  // optimizer.h
///     });
namespace cohort::optim {

/// An optimizer by name, as a configuration file says it. What is left open takes the optimizer's default.
struct OptimizerOptions {
  std::string name = "sgd";  ///< one of optimizer_names()
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  std::optional<double> momentum = {};   ///< sgd
  std::optional<double> dampening = {};  ///< sgd
  std::optional<bool> nesterov = {};     ///< sgd
  std::optional<double> beta1 = {};      ///< adam, adamw
  std::optional<double> beta2 = {};      ///< adam, adamw
  std::optional<double> eps = {};        ///< adam, adamw
  std::optional<bool> amsgrad = {};      ///< adam, adamw
  std::optional<bool> maximize = {};
  base::NamedOptions extra = {};  ///< of a registered optimizer (optim.options)
};

/// Makes an optimizer of a configuration's options over `groups`.
using OptimizerFactory = std::function<std::unique_ptr<Optimizer>(const OptimizerOptions& options,
                                                                  std::vector<ParamGroup> groups)>;

/// Returns a new optimizer of `groups`. Throws: UsageError for an unknown name, naming the nearest and all,
/// or for one that two libraries registered; ConfigError for an option that the optimizer does not have. A
/// weight_decay that a registered optimizer does not name in group_options() is a warning.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::vector<ParamGroup> groups);

/// Throws: UsageError for an unknown name, or one that two libraries registered.
void check_optimizer_name(const std::string& name);
/// Returns the names that make_optimizer knows, sorted.
std::vector<std::string> optimizer_names();

/// Makes `factory` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_optimizer(const std::string& name, OptimizerFactory factory);

/// What COHORT_REGISTER_OPTIMIZER calls while a library loads: a name that is taken stays with the first, and
/// make_optimizer throws, naming both places.
bool register_optimizer_at_load(const char* name, OptimizerFactory factory, const char* file,
                                int line) noexcept;

}  // namespace cohort::optim

/// Registers an optimizer where it is written, at namespace scope.
#define COHORT_REGISTER_OPTIMIZER(name, ...) \
  COHORT_REGISTER_AT_LOAD(optim::register_optimizer_at_load, name, __VA_ARGS__)
