#pragma once

#include <memory>

#include "cohort/optim/optimizer.h"

namespace cohort::optim {

/// An optimizer by name, as a configuration file says it. What is left open takes the optimizer's default.
struct OptimizerOptions {
  std::string name = "sgd";  ///< sgd, adam, adamw
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
};

/// Returns the names that make_optimizer knows.
std::vector<std::string> optimizer_names();

/// Throws: ConfigError for an unknown name, or for an option that the optimizer does not have.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::vector<ParamGroup> groups);

}  // namespace cohort::optim
