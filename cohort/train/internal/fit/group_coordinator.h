#pragma once

#include <ATen/core/Tensor.h>

#include "cohort/comm/group.h"
#include "cohort/train/internal/fit/rank_coordinator.h"

namespace cohort::train {

/// The ranks of a group, or one process alone, for which everything is local.
class GroupCoordinator : public RankCoordinator {
 public:
  /// `group` may be null, and must outlive this.
  explicit GroupCoordinator(const comm::Group* group) : group_(group) {}

  int rank() const override { return group_ == nullptr ? 0 : group_->rank(); }
  int size() const override { return group_ == nullptr ? 1 : group_->size(); }

  void step_done() const override;
  void write_trace(const std::filesystem::path& path) const override;
  void require_same(const std::string& what, const std::string& text) override;
  ControlRequests agree_on(const ControlRequests& requests) override;
  MetricSums total(MeterSet& meters) const override;
  double mean(double value) const override;
  void run_on_first(const std::function<void()>& fn) const override;
  std::optional<checkpoint::LoadedCheckpoint> load(
      const std::function<std::optional<checkpoint::LoadedCheckpoint>()>& load) const override;

 private:
  std::optional<checkpoint::LoadedCheckpoint> share(std::optional<checkpoint::LoadedCheckpoint> loaded) const;

  const comm::Group* group_;
  at::Tensor reduced_requests_;  // of the last agree_on(); all ranks' maximum once reduction_ is over
  comm::Pending reduction_;
};

}  // namespace cohort::train
