// The step is made of the same functions as that of a run, so what is planned or measured with it is what
// will run. Everything is made on the CPU, so a run on GPUs is planned without one. Batches are zeros of the
// data set's fields: their values change neither sizes nor operators.
#include "cohort/train/example_step.h"

#include <ATen/ATen.h>

#include <utility>

#include "cohort/base/error.h"
#include "cohort/train/internal/config_choices.h"
#include "cohort/train/internal/distributed_setup.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/input_fields.h"
#include "cohort/train/internal/model_runners.h"

namespace cohort::train {

ExampleStep::ExampleStep(ExampleStepOptions options) : options_(std::move(options)) {
  check_schedule_and_hook(options_.distributed);
  const auto data = make_dataset(options_.data, Split::kTrain,
                                 dataset_setup(options_.model, options_.train, options_.seed));
  fields_ = data->fields();
  if (fields_.size() < 2) throw UsageError("train.example_step", "the data has no target beside its input");
  input_ = input_field(options_.data, is_channels_last(options_.train), *data);
  num_classes_ = static_cast<std::int64_t>(data->classes().size());
}

at::Tensor ExampleStep::input(std::int64_t samples) const {
  return zero_batch(fields_[0], samples);
}

at::Tensor ExampleStep::target(std::int64_t samples) const {
  return zero_batch(fields_[1], samples);
}

std::int64_t ExampleStep::batch_bytes(std::int64_t samples) const {
  return samples * (fields_[0].bytes() + fields_[1].bytes());
}

torch::nn::AnyModule ExampleStep::make_model() const {
  return train::make_model(options_.model, {.input = input_,
                                            .num_classes = num_classes_,
                                            .seed = options_.seed,
                                            .channels_last = is_channels_last(options_.train)});
}

std::shared_ptr<optim::Optimizer> ExampleStep::make_optimizer(const torch::nn::Module& model) const {
  return train::make_optimizer(options_.optim, model);
}

parallel::ModelRunnerOptions ExampleStep::runner_options() const {
  return model_runner_options(options_.distributed, at::kCPU,
                              {.input = input_, .plan = options_.plan, .optim = options_.optim});
}

std::unique_ptr<optim::Autocast> ExampleStep::autocast() const {
  if (!is_bf16(options_.train)) return nullptr;
  return std::make_unique<optim::Autocast>(at::kCPU, at::kBFloat16);
}

at::Tensor ExampleStep::criterion(const at::Tensor& logits, const at::Tensor& target) const {
  // As ClassificationTask does it: the loss is float32 also under autocast, which takes a copy of the logits.
  return at::cross_entropy_loss(logits.to(at::kFloat), target, {}, at::Reduction::Mean, -100,
                                options_.train.label_smoothing);
}

parallel::VirtualRankOptions ExampleStep::virtual_rank_options() const {
  return train::virtual_rank_options(options_.distributed);
}

at::Tensor ExampleStep::loss(const std::function<at::Tensor(const at::Tensor&)>& forward,
                             const at::Tensor& input, const at::Tensor& target) const {
  at::Tensor logits;
  {
    const auto scope = autocast();
    logits = forward(input);
  }
  return criterion(logits, target);
}

void ExampleStep::run(const parallel::ModelRunner& runner, const at::Tensor& input, const at::Tensor& target,
                      const std::function<void()>& after_forward) const {
  // A pipeline makes forward and backward of micro-batches in turn, so there is no moment after the forward.
  if (runner.step) {
    const auto scope = autocast();
    runner.step(
        input, target,
        [this](const at::Tensor& logits, const at::Tensor& labels) { return criterion(logits, labels); }, 1);
    return;
  }
  const at::Tensor value = loss(runner.forward, input, target);
  if (after_forward) after_forward();
  value.backward();
}

}  // namespace cohort::train
