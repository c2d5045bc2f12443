#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/data/loader.h"
#include "cohort/optim/optimizer.h"

namespace cohort::train {

/// Where a training loop of one's own stands, so that it can be saved and resume with the same numbers.
///
///     cohort::train::LoopState loop(*net, optimizer, loader);
///     cohort::checkpoint::RunCheckpoints checkpoints("runs/mine/checkpoints");
///     if (auto found = checkpoints.load_usable()) loop.restore(found->content);
///     while (loop.step < steps) {
///       auto batch = loader.next();
///       if (!batch) continue;  // the end of an epoch: the next call begins another
///       ...
///       optimizer.step();
///       if (++loop.step % 100 == 0) checkpoints.save("step_" + std::to_string(loop.step), loop.content());
///     }
///
/// Holds references to all three. Threads: one caller at a time. A schedule has no state: apply it to
/// `step`. On several ranks the first saves, all restore, and each seeds its own chance:
/// core::reseed_generators(seed, step, rank) before a step.
class LoopState {
 public:
  LoopState(torch::nn::Module& model, optim::Optimizer& optimizer, data::Loader& loader);

  std::int64_t step = 0;  ///< steps made; the loop counts them

  /// Returns parameters and buffers, the optimizer's state, the position in the data, `step`, the state of
  /// LibTorch's generators of the devices on which parameters are (dropout draws from them), and `more`, for
  /// what else the loop remembers. Tensors of model and optimizer alias the live ones: save the content
  /// before the next step. Throws: UsageError for an optimizer whose state has a name that begins with
  /// "generator.".
  checkpoint::CheckpointContent content(const nlohmann::json& more = nullptr) const;

  /// Puts what content() returned into the model, the optimizer, the loader, the generators and `step`;
  /// returns `more`. Throws: DataError for content of another model, optimizer or data set, or that Trainer
  /// wrote. Model and optimizer may have been changed then.
  nlohmann::json restore(const checkpoint::CheckpointContent& content);

 private:
  torch::nn::Module& model_;
  optim::Optimizer& optimizer_;
  data::Loader& loader_;
};

}  // namespace cohort::train
