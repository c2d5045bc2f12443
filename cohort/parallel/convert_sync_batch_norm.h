#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "cohort/comm/group.h"

namespace cohort::parallel {

/// Replaces every torch::nn::BatchNorm1d, 2d and 3d within `module` by a SyncBatchNorm over `group`, and
/// returns how many there were. Parameters and statistics are shared with what was there, so optimizers
/// that were made before stay right, and modes are kept.
/// A norm can be replaced where nobody calls it by its type: in torch::nn::Sequential, in the models of
/// cohort::models, in a module that is a core::LayerHost (core/any_layer.h). A module that has a BatchNorm as
/// a member calls that one for ever: it is rejected, and nothing is replaced then.
/// Call it on all ranks; clones that are made afterwards are converted too.
/// Throws: UsageError naming a norm that cannot be replaced, such as "block.bn", with the line to write.
std::int64_t convert_sync_batch_norm(torch::nn::Module& module, const comm::Group& group);

}  // namespace cohort::parallel
