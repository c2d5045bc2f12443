#include "cohort/train/internal/fit/fit_ranks.h"

#include <utility>

namespace cohort::train {

FitRanks::FitRanks(const TrainerOptions& options)
    : FitRanks(options.gradient_sync() != nullptr ? options.gradient_sync()
                                                  : std::make_shared<parallel::GradientSync>()) {}

FitRanks::FitRanks(std::shared_ptr<parallel::GradientSync> gradient_sync)
    : RankCoordinator(gradient_sync->group()), gradient_sync_(std::move(gradient_sync)) {}

FitRanks::~FitRanks() {
  if (task_ != nullptr) task_->set_gradient_sync(std::make_shared<parallel::GradientSync>());
}

void FitRanks::join(Task& task) {
  task_ = &task;
  task.set_gradient_sync(gradient_sync_);
}

}  // namespace cohort::train
