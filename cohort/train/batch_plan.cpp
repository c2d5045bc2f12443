#include "cohort/train/batch_plan.h"

#include "cohort/base/error.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/train/internal/config_choices.h"

namespace cohort::train {
namespace {

// check_config() has looked at a configuration that was read, and not at one that a program made.
void check_divisor(const char* name, std::int64_t value) {
  if (value >= 1) return;
  throw UsageError("train.batch_plan", base::concat(name, ": got ", value, ", expected at least 1"));
}

// Where nothing else sets it.
std::int64_t default_step_of_rank(const config::TrainConfig& train) {
  return train.batch_size * train.accumulate;
}

}  // namespace

// More micro-batches than samples are cut into one sample each.
std::int64_t largest_micro_batch(std::int64_t samples, std::int64_t num_micro_batches) {
  return divided_up(samples, num_micro_batches);
}

std::int64_t num_shares(const config::DistributedConfig& distributed, std::int64_t num_ranks) {
  return distributed.virtual_ranks > 0 ? distributed.virtual_ranks : num_ranks;
}

std::int64_t global_batch_size(const config::TrainConfig& train, std::int64_t num_ranks) {
  if (train.global_batch_size > 0) return train.global_batch_size;
  return default_step_of_rank(train) * num_ranks;
}

std::int64_t lr_base_size(const config::OptimConfig& optim, const config::TrainConfig& train) {
  return optim.lr_base_size > 0 ? optim.lr_base_size : default_step_of_rank(train);
}

std::int64_t global_evaluation_size(const config::TrainConfig& train, std::int64_t num_ranks) {
  return config::eval_batch_size(train) * num_ranks;
}

std::int64_t BatchPlan::replica(std::int64_t num_replicas) const {
  return divided_up(part, num_replicas);
}

BatchPlan BatchPlan::with_whole_steps() const {
  BatchPlan whole = *this;
  whole.loaded = step;
  whole.loader_parts = 1;
  whole.task_parts = loader_parts * task_parts;
  return whole;
}

BatchPlan batch_plan(const config::TrainConfig& train, const config::DistributedConfig& distributed,
                     const config::DataConfig& data, int num_ranks) {
  check_divisor("num_ranks", num_ranks);
  check_divisor("train.accumulate", train.accumulate);
  BatchPlan plan;
  const std::int64_t shares = num_shares(distributed, num_ranks);
  plan.global = global_batch_size(train, shares);
  check_divisor("samples of a step", plan.global);
  // All sizes are the largest that a rank, or a part, gets: buffers and plans of memory are made for these.
  plan.step = divided_up(plan.global, shares);
  plan.part = divided_up(plan.step, train.accumulate);
  plan.micro_batch = plan.part;
  if (parallel::model_runner_type(distributed.model).cuts_micro_batches) {
    check_divisor("distributed.micro_batches", distributed.micro_batches);
    plan.micro_batch = largest_micro_batch(plan.part, distributed.micro_batches);
  }
  plan.loaded = plan.part;
  plan.loader_parts = train.accumulate;
  plan.evaluation = global_evaluation_size(train, 1);
  // With "skip" the number of samples is known only when the whole batch was read.
  return on_error_of(data) == data::OnError::kSkip ? plan.with_whole_steps() : plan;
}

}  // namespace cohort::train
