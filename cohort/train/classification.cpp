// A share of a step adds up its parts, each weighed by its part of the share's samples, so it has the
// gradients of the whole share. Only the last part's backward averages over ranks. Several shares are virtual
// ranks: the gradient sync takes the gradients of each, and each has its own metrics. A loss that is not
// finite ends the parts, and no step is made. All ranks learn that in the average, so they skip the step
// together. On an accelerator nobody looks at the loss: NaN goes into backward in its place, and shows in the
// gradients.
#include "cohort/train/classification.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/timeline.h"
#include "cohort/models/observer.h"
#include "cohort/optim/autocast.h"
#include "cohort/train/batch_plan.h"

namespace cohort::train {
namespace {

constexpr const char* kWhereTask = "train.ClassificationTask";

// On an accelerator looking at the loss would wait for it; Trainer looks one step later.
bool is_finite(const at::Tensor& loss) {
  // True on an accelerator means "not known yet".
  return !loss.device().is_cpu() || std::isfinite(loss.item<double>());
}

/// What backward begins with: 1. On an accelerator, where nobody has looked at the loss, NaN for a loss that
/// is not finite, so that the gradients of every rank say so.
at::Tensor seed_of(const at::Tensor& loss) {
  return loss.device().is_cpu() ? at::Tensor() : loss.mul(0).add_(1);
}

std::string text_of(const at::Tensor& tensor) {
  return base::concat(c10::toString(tensor.scalar_type()), " ", tensor.sizes());
}

/// The loss takes targets of other kinds too, and the accuracy would then be a number that means nothing.
void check_targets(data::Batch& batch) {
  constexpr const char* kHint =
      "a Task of your own (docs/guide/trainer.md) for regression, segmentation and whatever is no class";
  if (batch.fields.size() < 2) {
    throw DataError(kWhereTask, "the samples have no target: the data set has one field only", kHint);
  }
  const at::Tensor& target = batch.target();
  if (target.dim() == 1 && target.scalar_type() == at::kLong) return;
  throw DataError(kWhereTask,
                  base::concat("the targets of a batch are ", text_of(target),
                               ", and a classifier takes Long [", batch.size, "], a class for each sample"),
                  kHint);
}

at::Tensor count_correct(const at::Tensor& logits, const at::Tensor& target) {
  return logits.detach().argmax(1).eq(target).sum();
}

}  // namespace

ClassificationTask::ClassificationTask(torch::nn::AnyModule model,
                                       std::shared_ptr<optim::Optimizer> optimizer,
                                       std::shared_ptr<const optim::LRSchedule> schedule,
                                       ClassificationOptions options)
    : ClassificationTask(model.ptr(), parallel::ModelRunner{[model](const at::Tensor& input) mutable {
                           return model.forward<at::Tensor>(input);
                         }},
                         std::move(optimizer), std::move(schedule), options) {
  any_model_ = model;
}

ClassificationTask::ClassificationTask(torch::nn::AnyModule model, parallel::ModelRunner runner,
                                       std::shared_ptr<optim::Optimizer> optimizer,
                                       std::shared_ptr<const optim::LRSchedule> schedule,
                                       ClassificationOptions options)
    : ClassificationTask(model.ptr(), std::move(runner), std::move(optimizer), std::move(schedule), options) {
  any_model_ = std::move(model);
}

ClassificationTask::ClassificationTask(std::shared_ptr<torch::nn::Module> module,
                                       parallel::ModelRunner runner,
                                       std::shared_ptr<optim::Optimizer> optimizer,
                                       std::shared_ptr<const optim::LRSchedule> schedule,
                                       ClassificationOptions options)
    : runner_(std::move(runner)), optimizer_(optimizer), options_(options) {
  if (options_.accumulate() < 1) {
    throw UsageError(kWhereTask,
                     base::concat("accumulate: got ", options_.accumulate(), ", expected at least 1"));
  }
  if (options_.script() && runner_.step) {
    throw UsageError(
        kWhereTask,
        "script: a step that overlaps forward and backward on threads of its own cannot be recorded",
        "ClassificationOptions().script(false)");
  }
  add_module("", std::move(module));
  if (optimizer_) add_optimizer("", std::move(optimizer), std::move(schedule));
}

std::unique_ptr<optim::Autocast> ClassificationTask::autocast(const at::Tensor& input) const {
  if (!options_.bf16()) return nullptr;
  return std::make_unique<optim::Autocast>(input.device().type(), at::kBFloat16);
}

at::Tensor ClassificationTask::forward(const at::Tensor& input) {
  const auto scope = autocast(input);
  return runner_.forward(input);
}

at::Tensor ClassificationTask::loss(const at::Tensor& logits, const at::Tensor& target) const {
  // In float32 also under autocast: bfloat16 has 8 bits of precision, too few for a sum of exponentials. -100
  // is PyTorch's ignore_index.
  return at::cross_entropy_loss(logits.scalar_type() == at::kFloat ? logits : logits.to(at::kFloat), target,
                                {}, at::Reduction::Mean, -100, options_.label_smoothing());
}

script::Tensors ClassificationTask::training_loss(const at::Tensor& input, const at::Tensor& target) {
  const at::Tensor logits = forward(input);
  return {loss(logits, target), count_correct(logits, target)};
}

script::Tensors ClassificationTask::evaluation_loss(const at::Tensor& input, const at::Tensor& target) {
  const at::Tensor logits = forward(input);
  // Without label smoothing, so that the validation loss of runs with and without it can be compared.
  return {at::cross_entropy_loss(logits.to(at::kFloat), target), count_correct(logits, target)};
}

script::Tensors ClassificationTask::run(std::unique_ptr<script::Function>& scripted, const char* name,
                                        LossOf loss_of, const at::Tensor& input, const at::Tensor& target) {
  try {
    if (!options_.script()) return (this->*loss_of)(input, target);
    // At the first call, as the gradient sync and the modules of the task are set after its constructor.
    if (scripted == nullptr) {
      scripted = std::make_unique<script::Function>(
          [this, loss_of](const script::Tensors& inputs) { return (this->*loss_of)(inputs[0], inputs[1]); },
          script::ScriptOptions()
              .name(name)
              .log(gradient_sync().rank() == 0)
              .modules({modules().front().module}));
    }
    return (*scripted)({input, target});
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) {  // LibTorch's, which knows neither the batch nor what it is for
    throw DataError(kWhereTask, base::concat(name, " on a batch of inputs ", text_of(input), " and targets ",
                                             text_of(target), ": ", base::message_of(error)));
  }
}

ClassificationTask::BatchPart ClassificationTask::compute(const at::Tensor& input, const at::Tensor& target,
                                                          double scale, double weight, bool last) {
  if (runner_.step) {
    const auto narrow = autocast(input);
    const base::TimelineScope scope("forward and backward");
    const auto [value, logits] = runner_.step(
        input, target, [this](const at::Tensor& out, const at::Tensor& labels) { return loss(out, labels); },
        scale);
    return {value, count_correct(logits, target), is_finite(value)};
  }
  at::Tensor value, correct;
  {
    const base::TimelineScope scope("forward");
    script::Tensors found =
        run(scripted_training_, "training", &ClassificationTask::training_loss, input, target);
    value = std::move(found[0]);
    correct = std::move(found[1]);
    if (scale != 1) value = value * scale;
  }
  const BatchPart part{value.detach(), correct, is_finite(value)};
  if (!part.finite) {
    prepare_average(*optimizer_, weight, false);  // says where: with virtual ranks others may follow
    return part;
  }
  // Before the last backward, during which gradients are averaged bucket by bucket. Earlier parts only add
  // up.
  if (last) prepare_average(*optimizer_, weight);
  const base::TimelineScope scope("backward");
  value.backward(seed_of(part.loss));
  return part;
}

void ClassificationTask::StepSum::add(const BatchPart& part) {
  correct = correct.defined() ? correct.add(part.correct) : part.correct;
  loss = loss.defined() ? loss + part.loss : part.loss;
  finite = part.finite;
}

void ClassificationTask::StepSum::add_to(StepMetrics& metrics, double weight) const {
  metrics.emplace_back("loss", loss, weight);
  metrics.emplace_back("accuracy", correct.to(at::kDouble).div(weight), weight);
}

// A part of a share as the loader handed it out, in as many parts of its own as the options say.
void ClassificationTask::add_parts(data::Batch& batch, bool last, StepSum& sum) {
  const auto weight = static_cast<double>(batch.whole_size);
  // Of this batch and not BatchPlan's: the last of an epoch, or one with skipped samples, is smaller.
  const std::int64_t part_size = divided_up(batch.size, options_.accumulate());
  for (std::int64_t begin = 0; begin < batch.size && sum.finite; begin += part_size) {
    const std::int64_t count = std::min(part_size, batch.size - begin);
    const bool whole = count == batch.size;
    const at::Tensor input = whole ? batch.input() : batch.input().narrow(0, begin, count);
    const at::Tensor target = whole ? batch.target() : batch.target().narrow(0, begin, count);
    // The loss is a mean over the part, so the part counts by its share of the samples of the step.
    const double scale = count == batch.whole_size ? 1 : static_cast<double>(count) / weight;
    sum.add(compute(input, target, scale, weight, last && begin + count == batch.size));
  }
}

StepMetrics ClassificationTask::train_step(data::Batch& batch) {
  StepSum sum;
  StepMetrics metrics;
  // Before the parts, never between them.
  optimizer_->zero_grad();
  std::int64_t taken = 0;
  do {
    check_targets(batch);
    taken += batch.size;
    const bool ends_share = taken == batch.whole_size;
    add_parts(batch, ends_share && batch.take_next == nullptr, sum);
    if (!ends_share) continue;
    // A rank without a sample in the step takes part in the average and in the optimizer's step all the same.
    if (sum.finite && batch.whole_size > 0) sum.add_to(metrics, static_cast<double>(batch.whole_size));
    sum.loss.reset();
    sum.correct.reset();
    taken = 0;
  } while (batch.advance());
  const auto weight = static_cast<double>(batch.whole_size);
  report_metrics(metrics);
  {
    base::TimelineScope scope("average");
    sum.finite = average_gradients(*optimizer_, weight, sum.finite);
  }
  if (sum.finite) {
    base::TimelineScope scope("optimizer");
    step_if_finite(*optimizer_, options_.clip_norm());
  }
  // A loss that was not finite on another rank: the step counts as such on all.
  if (!sum.finite) return {{"loss", std::numeric_limits<double>::quiet_NaN(), weight}};
  return metrics;
}

StepMetrics ClassificationTask::eval_step(data::Batch& batch) {
  check_targets(batch);
  const auto weight = static_cast<double>(batch.size);
  const script::Tensors found = run(scripted_evaluation_, "evaluation", &ClassificationTask::evaluation_loss,
                                    batch.input(), batch.target());
  return {{"loss", found[0], weight}, {"accuracy", found[1].to(at::kDouble).div(weight), weight}};
}

std::string ClassificationTask::explain() const {
  std::string text;
  for (const auto* scripted : {scripted_training_.get(), scripted_evaluation_.get()}) {
    if (scripted != nullptr) text += scripted->explain();
  }
  return text;
}

std::string ClassificationTask::find_non_finite(data::Batch& batch) {
  if (!at::isfinite(batch.input()).all().item<bool>()) return "input";
  // Without a module there is only a function, whose layers cannot be observed.
  if (!any_model_) return "";
  for (const at::Tensor& parameter : any_model_->ptr()->parameters()) {
    if (parameter.device() != batch.input().device()) return "";  // layers are on several devices
  }
  return models::first_non_finite(*any_model_, batch.input()).value_or("");
}

}  // namespace cohort::train
