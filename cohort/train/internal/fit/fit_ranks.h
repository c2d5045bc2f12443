#pragma once

#include <memory>

#include "cohort/parallel/gradient_sync.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

class ElasticCoordinator;

/// The ranks of a fit or of an evaluation: their gradient sync, and what else they tell each other.
class FitRanks {
 public:
  /// Takes the gradient sync of `options`; where they have none, that of one process alone.
  explicit FitRanks(const TrainerOptions& options);
  /// The task that joined has the sync of one process again: used after the fit, it must not wait for ranks
  /// that have left.
  ~FitRanks();
  FitRanks(const FitRanks&) = delete;
  FitRanks& operator=(const FitRanks&) = delete;

  parallel::GradientSync& gradient_sync() const { return *gradient_sync_; }
  RankCoordinator& coordinator() const { return *coordinator_; }
  /// The coordinator of an elastic run; null: none.
  ElasticCoordinator* elastic() const { return elastic_; }

  /// `task`, which must outlive this, works with the ranks until this is destroyed.
  void join(Task& task);

 private:
  std::shared_ptr<parallel::GradientSync> gradient_sync_;
  std::unique_ptr<RankCoordinator> coordinator_;
  ElasticCoordinator* elastic_ = nullptr;
  Task* task_ = nullptr;  // that joined
};

}  // namespace cohort::train
