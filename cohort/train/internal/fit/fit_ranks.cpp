#include "cohort/train/internal/fit/fit_ranks.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/internal/elastic/elastic_coordinator.h"
#include "cohort/train/internal/fit/group_coordinator.h"

namespace cohort::train {
namespace {

void check_elastic_sync(const TrainerOptions& options, parallel::GradientSync& gradient_sync) {
  const parallel::VirtualRankSync* const sync = gradient_sync.virtual_ranks();
  const std::int64_t count = options.session()->virtual_ranks();
  if (sync != nullptr && sync->group() == nullptr && sync->num_virtual_ranks() == count) return;
  throw UsageError("train.elastic",
                   base::concat("the gradient sync of an elastic run is ", gradient_sync.name(),
                                ", expected ", count, " virtual ranks without a group, as the session has"),
                   "parallel::VirtualRankSync({}, {.num_virtual_ranks = session->virtual_ranks()})");
}

}  // namespace

FitRanks::FitRanks(const TrainerOptions& options)
    : gradient_sync_(options.gradient_sync() != nullptr ? options.gradient_sync()
                                                        : std::make_shared<parallel::GradientSync>()) {
  if (options.session() == nullptr) {
    coordinator_ = std::make_unique<GroupCoordinator>(gradient_sync_->group());
    return;
  }
  check_elastic_sync(options, *gradient_sync_);
  auto elastic = std::make_unique<ElasticCoordinator>(options.session());
  elastic_ = elastic.get();
  coordinator_ = std::move(elastic);
}

FitRanks::~FitRanks() {
  if (task_ != nullptr) task_->set_gradient_sync(std::make_shared<parallel::GradientSync>());
}

void FitRanks::join(Task& task) {
  task_ = &task;
  task.set_gradient_sync(gradient_sync_);
}

}  // namespace cohort::train
