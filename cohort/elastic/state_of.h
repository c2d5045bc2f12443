#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "cohort/elastic/session.h"
#include "cohort/optim/optimizer.h"

namespace cohort::elastic {

/// The state of a loop whose steps change nothing but a module's parameters and buffers and an optimizer, its
/// rates included. Parameters and the optimizer's tensors lie in memory that outlives the process, so nothing
/// else may change them, not even from one step to the next: a successor would train on from there.
/// Ownership: shares both.
StateAccess state_of(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<optim::Optimizer> optimizer);

}  // namespace cohort::elastic
