#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "cohort/optim/autocast.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/script/function.h"
#include "cohort/train/task.h"

namespace cohort::train {

/// How a classifier's step is computed.
struct ClassificationOptions {
  /// Share of the target that is spread over all classes in training; 0 to 1.
  TORCH_ARG(double, label_smoothing) = 0;
  /// The batch is computed in so many parts, one after the other, and gives one update: less memory for
  /// activations. Where the loader hands it out in parts (LoaderOptions::parts: less memory for input too),
  /// each of them is. Each part's loss is weighted by its share of samples, so an uneven last part counts
  /// what it holds.
  TORCH_ARG(std::int64_t, accumulate) = 1;
  /// Gradients are scaled down to this norm; 0: not clipped.
  TORCH_ARG(double, clip_norm) = 0;
  /// Forward in bfloat16 where LibTorch's autocast says that it is safe; parameters stay float.
  TORCH_ARG(bool, bf16) = false;
  /// Forward, loss and backward are recorded and then replayed, with the same numbers: docs/guide/script.md.
  /// The log says, once for each size of batch, what was recorded, or why such batches run eagerly.
  TORCH_ARG(bool, script) = false;
};

/// Image classification: cross entropy and accuracy of a model that maps [N, C, H, W] to [N, classes].
///
/// Each batch's targets must be one class for each sample: a step throws DataError for others, and for what
/// LibTorch rejects in the model or the loss, with the batch's types and shapes in front.
///
/// Metrics: "loss" (mean over the batch) and "accuracy" (0 to 1), of each virtual rank. A batch whose loss or
/// gradients are not finite changes nothing but running statistics, and these Trainer restores.
class ClassificationTask : public Task {
 public:
  /// Shapes: the batch's input [N, ...], its target [N] of int64 class numbers.
  /// Throws: UsageError for options out of range, or `script` with a call that has a step of its own.
  ClassificationTask(torch::nn::AnyModule model, std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::LRSchedule> schedule, ClassificationOptions options = {});

  /// The same for a module of any type whose forward maps a tensor to a tensor, such as `sequential.ptr()`,
  /// which AnyModule cannot hold.
  template <typename M>
  ClassificationTask(std::shared_ptr<M> model, std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::LRSchedule> schedule, ClassificationOptions options = {})
      : ClassificationTask(
            model, parallel::ModelRunner{[model](const at::Tensor& input) { return model->forward(input); }},
            std::move(optimizer), std::move(schedule), options) {}

  /// The same for a model that is called otherwise than by itself: by make_model_runner().
  ClassificationTask(torch::nn::AnyModule model, parallel::ModelRunner runner,
                     std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::LRSchedule> schedule, ClassificationOptions options = {});

  StepMetrics train_step(data::Batch& batch) override;
  StepMetrics eval_step(data::Batch& batch) override;
  std::string find_non_finite(data::Batch& batch) override;
  /// Says what script mode recorded of training and evaluation, or why these run eagerly; empty without it.
  std::string explain() const;

 private:
  ClassificationTask(std::shared_ptr<torch::nn::Module> module, parallel::ModelRunner runner,
                     std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::LRSchedule> schedule, ClassificationOptions options);

  // Mean loss, with its graph where gradients are on, and number of right answers.
  script::Tensors training_loss(const at::Tensor& input, const at::Tensor& target);
  script::Tensors evaluation_loss(const at::Tensor& input, const at::Tensor& target);
  using LossOf = script::Tensors (ClassificationTask::*)(const at::Tensor& input, const at::Tensor& target);
  // Calls `loss_of`, or what was recorded of it.
  script::Tensors run(std::unique_ptr<script::Function>& scripted, const char* name, LossOf loss_of,
                      const at::Tensor& input, const at::Tensor& target);
  at::Tensor forward(const at::Tensor& input);
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& target) const;
  std::unique_ptr<optim::Autocast> autocast(const at::Tensor& input) const;  // null where it is off
  // One part of a batch, without graph; the loss is the part's share of the batch's.
  struct BatchPart {
    at::Tensor loss, correct;
    bool finite;
  };
  // What parts of a share add up to.
  struct StepSum {
    at::Tensor loss, correct;
    bool finite = true;  // of the step so far
    void add(const BatchPart& part);
    void add_to(StepMetrics& metrics, double weight) const;
  };
  void add_parts(data::Batch& batch, bool last, StepSum& sum);
  // Forward and backward of `input`, whose share of the batch is `scale`; `last`: none of this step follows.
  BatchPart compute(const at::Tensor& input, const at::Tensor& target, double scale, double weight,
                    bool last);

  parallel::ModelRunner runner_;
  std::optional<torch::nn::AnyModule> any_model_;  // where the layers of the model can be watched
  std::shared_ptr<optim::Optimizer> optimizer_;
  ClassificationOptions options_;
  std::unique_ptr<script::Function> scripted_training_, scripted_evaluation_;  // made at their first call
};

}  // namespace cohort::train
