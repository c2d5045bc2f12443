#include "cohort/optim/factory.h"

#include "cohort/base/error.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"

namespace cohort::optim {
namespace {

using base::concat;

template <typename... Values>
void refuse_foreign(const std::string& name, const char* options, const Values&... values) {
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

}  // namespace

std::vector<std::string> optimizer_names() {
  return {"sgd", "adam", "adamw"};
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::vector<ParamGroup> groups) {
  if (options.name == "sgd") {
    refuse_foreign("sgd", "beta1, beta2, eps, amsgrad", options.beta1, options.beta2, options.eps,
                   options.amsgrad);
    return std::make_unique<SGD>(std::move(groups), sgd_options(options));
  }
  if (options.name == "adam" || options.name == "adamw") {
    refuse_foreign(options.name, "momentum, dampening, nesterov", options.momentum, options.dampening,
                   options.nesterov);
    if (options.name == "adam")
      return std::make_unique<Adam>(std::move(groups), adam_options<AdamOptions>(options));
    return std::make_unique<AdamW>(std::move(groups), adam_options<AdamWOptions>(options));
  }
  const std::vector<std::string> names = optimizer_names();
  const auto near = base::nearest_name(options.name, names);
  throw ConfigError("optim.make_optimizer",
                    concat("unknown optimizer \"", options.name, "\", expected sgd, adam or adamw"),
                    near ? concat("\"", *near, "\"") : "");
}

}  // namespace cohort::optim
