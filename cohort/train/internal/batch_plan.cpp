#include "cohort/train/internal/batch_plan.h"

#include <algorithm>

#include "cohort/parallel/model_runner.h"

namespace cohort::train {

std::int64_t global_batch_size(const config::TrainConfig& train, int num_ranks) {
  if (train.global_batch_size > 0) return train.global_batch_size;
  return train.batch_size * train.accumulate * num_ranks;
}

BatchPlan batch_plan(const config::TrainConfig& train, const config::DistributedConfig& distributed,
                     const config::DataConfig& data, int num_ranks) {
  BatchPlan plan;
  plan.global = global_batch_size(train, num_ranks);
  // All sizes are the largest that a rank, or a part, gets: buffers and plans of memory are made for these.
  plan.step = divided_up(plan.global, num_ranks);
  plan.part = divided_up(plan.step, train.accumulate);
  plan.micro_batch = plan.part;
  if (parallel::model_runner_type(distributed.model).cuts_micro_batches) {
    // Not more micro-batches than samples: an empty one would have no gradient.
    plan.micro_batch = divided_up(plan.part, std::min(plan.part, distributed.micro_batches));
  }
  // With "skip" the number of samples is known only when the whole batch was read. Then the loader makes one
  // batch, and the task cuts it.
  const bool loads_parts = data.on_error != "skip";
  plan.loaded = loads_parts ? plan.part : plan.step;
  plan.loader_parts = loads_parts ? train.accumulate : 1;
  plan.task_parts = loads_parts ? 1 : train.accumulate;
  plan.evaluation = config::eval_batch_size(train);
  return plan;
}

}  // namespace cohort::train
