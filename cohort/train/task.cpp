// What a task does between backward and step goes through the gradient sync, which alone knows whether there
// are ranks. Reports that come before an average belong to it, and are gone after it.
#include "cohort/train/task.h"

#include <cmath>

#include "cohort/base/error.h"
#include "cohort/optim/clip.h"

namespace cohort::train {

StepMetrics Task::eval_step(data::Batch&) {
  throw UsageError("train.eval_step", "this task has no evaluation step",
                   "override Task::eval_step, or call Trainer::fit without an evaluation loader");
}

void Task::set_training(bool training) {
  for (const parallel::NamedModule& entry : parts_.modules) entry.module->train(training);
}

std::string Task::find_non_finite(data::Batch&) {
  return "";
}

void Task::set_gradient_sync(std::shared_ptr<parallel::GradientSync> gradient_sync) {
  gradient_sync_ = std::move(gradient_sync);
}

void Task::report_metrics(const StepMetrics& metrics) {
  reported_.insert(reported_.end(), metrics.begin(), metrics.end());
  ++num_reports_;
}

void Task::prepare_average(const optim::Optimizer& optimizer, double samples, bool finite) {
  // The hooks that average during backward have to be armed before it begins.
  gradient_sync_->prepare(optimizer, samples, finite);
}

bool Task::average_gradients(const optim::Optimizer& optimizer, double samples, bool finite) {
  for (const Metric& metric : reported_) {
    if (metric.name == "loss" && !metric.device_value.defined() && !std::isfinite(metric.value))
      finite = false;
  }
  // Kept for the error of a step that is not finite, which names the rank.
  last_average_ = gradient_sync_->average(optimizer, samples, finite);
  reported_.clear();
  // The loop counts these calls: a task of several ranks that forgets to average is an error there.
  ++num_averages_;
  return last_average_.ok();
}

void Task::step_if_finite(optim::Optimizer& optimizer, double clip_norm) {
  const std::vector<optim::ParamGroup>& groups = optimizer.param_groups();
  // Clipping computes a norm anyway, which says for free on the CPU whether all gradients are finite.
  const optim::NonFinite found = clip_norm > 0 ? optim::clip_grad_norm_unless_non_finite_(groups, clip_norm)
                                               : optim::find_non_finite(groups);
  gradient_sync_->step(optimizer, found);
  non_finite_.add(found);
}

void Task::add_module(std::string name, std::shared_ptr<torch::nn::Module> module) {
  // Names are prefixes in checkpoints: two equal ones would write over each other.
  for (const parallel::NamedModule& entry : parts_.modules) {
    if (entry.name == name) {
      throw UsageError("train.add_module", base::concat("a module named \"", name, "\" was added twice"),
                       "give every module of a task its own name");
    }
  }
  parts_.modules.push_back({std::move(name), std::move(module)});
}

void Task::add_optimizer(std::string name, std::shared_ptr<optim::Optimizer> optimizer,
                         std::shared_ptr<const optim::LRSchedule> schedule) {
  for (const parallel::NamedOptimizer& entry : parts_.optimizers) {
    if (entry.name == name) {
      throw UsageError("train.add_optimizer",
                       base::concat("an optimizer named \"", name, "\" was added twice"),
                       "give every optimizer of a task its own name");
    }
  }
  parts_.optimizers.push_back({std::move(name), std::move(optimizer), std::move(schedule)});
}

}  // namespace cohort::train
