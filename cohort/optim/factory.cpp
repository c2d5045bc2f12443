// Each optimizer takes its options from one struct, and rejects those that belong to another. Options are
// optional values, so an option that was not given leaves the optimizer's own default in force. A registered
// factory gets the same checks around it as Cohort's own: an option that nobody read is an error.
#include "cohort/optim/factory.h"

#include <cmath>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/make_named.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"

namespace cohort::optim {
namespace {

using base::concat;
constexpr const char* kOptimizerOptions = "optim.options";

template <typename... Values>
void reject_foreign(const std::string& name, const char* options, const Values&... values) {
  // An option without effect is an error here: a momentum given to adam would change nothing in silence.
  if ((values.has_value() || ...))
    throw ConfigError("optim.make_optimizer", concat(name, " has none of the options ", options),
                      "remove them, or choose another optimizer");
}

template <typename Options>
Options adam_options(const OptimizerOptions& from) {
  Options options;
  if (from.lr) options.lr(*from.lr);
  if (from.weight_decay) options.weight_decay(*from.weight_decay);
  if (from.beta1) options.beta1(*from.beta1);
  if (from.beta2) options.beta2(*from.beta2);
  if (from.eps) options.eps(*from.eps);
  if (from.amsgrad) options.amsgrad(*from.amsgrad);
  if (from.maximize) options.maximize(*from.maximize);
  return options;
}

SGDOptions sgd_options(const OptimizerOptions& from) {
  SGDOptions options;
  if (from.lr) options.lr(*from.lr);
  if (from.weight_decay) options.weight_decay(*from.weight_decay);
  if (from.momentum) options.momentum(*from.momentum);
  if (from.dampening) options.dampening(*from.dampening);
  if (from.nesterov) options.nesterov(*from.nesterov);
  if (from.maximize) options.maximize(*from.maximize);
  return options;
}

std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options, std::vector<ParamGroup> groups) {
  reject_foreign("sgd", "beta1, beta2, eps, amsgrad", options.beta1, options.beta2, options.eps,
                 options.amsgrad);
  return std::make_unique<SGD>(std::move(groups), sgd_options(options));
}

template <typename Adams, typename Options>
std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options, std::vector<ParamGroup> groups) {
  reject_foreign(options.name, "momentum, dampening, nesterov", options.momentum, options.dampening,
                 options.nesterov);
  return std::make_unique<Adams>(std::move(groups), adam_options<Options>(options));
}

// Cohort's own have no other options than OptimizerOptions'.
template <typename Make>
OptimizerFactory built_in_optimizer(Make make) {
  return base::without_extra("optimizer", kOptimizerOptions, std::move(make));
}

// A configuration sets weight_decay for any optimizer. Whether step() reads it, group_options() says.
void warn_of_decay(const Optimizer& optimizer, double weight_decay, const std::string& owner) {
  if (weight_decay == 0 || optimizer.has_option("weight_decay")) return;
  base::warn_once(
      concat("optim.weight_decay of ", owner),
      concat(owner, " may not use weight_decay ", weight_decay, ": its group_options() do not name it"));
}

// What the factory throws says which optimizer it was, and no option is ignored.
OptimizerFactory checked(const std::string& name, OptimizerFactory factory) {
  return [name, factory = std::move(factory)](const OptimizerOptions& given, std::vector<ParamGroup> groups) {
    const std::string owner = concat("optimizer '", name, "'");
    // Registration at load time cannot throw, so an empty factory is found on its first use.
    if (!factory) throw UsageError("optim.registry", concat(owner, " was registered without a factory"));
    const auto make = [&](const base::NamedOptions& extra) {
      OptimizerOptions options = given;
      options.extra = extra;
      return factory(options, std::move(groups));
    };
    auto optimizer =
        base::make_named<UsageError>("optim.registry", kOptimizerOptions, owner, given.extra, make);
    for (const ParamGroup& group : optimizer->param_groups()) {
      // NaN says "not set". The first step would make every parameter NaN, far from the cause.
      if (!std::isnan(group.lr)) continue;
      throw UsageError("optim.registry", concat(owner, " leaves lr of a group open"),
                       "fill_options({.lr = options.lr.value_or(0.01)}) in its constructor");
    }
    warn_of_decay(*optimizer, given.weight_decay.value_or(0), owner);
    return optimizer;
  };
}

base::Registry<OptimizerFactory>& optimizer_registry() {
  // Never destroyed: static objects of plug-ins may still use it while the program ends.
  static auto* instance =
      new base::Registry<OptimizerFactory>("optimizer", "optim.make_optimizer",
                                           {{"sgd", built_in_optimizer(make_sgd)},
                                            {"adam", built_in_optimizer(make_adam<Adam, AdamOptions>)},
                                            {"adamw", built_in_optimizer(make_adam<AdamW, AdamWOptions>)}});
  return *instance;
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::vector<ParamGroup> groups) {
  return optimizer_registry().get(options.name)(options, std::move(groups));
}

void check_optimizer_name(const std::string& name) {
  optimizer_registry().get(name);
}

std::vector<std::string> optimizer_names() {
  return optimizer_registry().names();
}

void register_optimizer(const std::string& name, OptimizerFactory factory) {
  if (!factory) throw UsageError("optim.registry", "an optimizer needs a factory");
  optimizer_registry().add(name, checked(name, std::move(factory)), "register_optimizer");
}

bool register_optimizer_at_load(const char* name, OptimizerFactory factory, const char* file,
                                int line) noexcept {
  return optimizer_registry().add_at_load(name, checked(name, std::move(factory)), file, line);
}

}  // namespace cohort::optim
