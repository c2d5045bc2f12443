#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/comm/group.h"
#include "cohort/train/metrics.h"

/// What the ranks of a run tell each other besides gradients. Internal to this module.
namespace cohort::train {

/// With one process everything is local. Collective, with several: each function but the getters.
class RankCoordinator {
 public:
  /// What a rank would like to happen after a step.
  struct ControlRequests {
    int stop_signal = 0;    ///< a signal asked to stop
    bool save_now = false;  ///< a signal asked to save
    bool save_due = false;  ///< enough time has passed since the last checkpoint
  };

  /// `group` may be null, and must outlive this.
  explicit RankCoordinator(const comm::Group* group) : group_(group) {}

  int rank() const { return group_ == nullptr ? 0 : group_->rank(); }
  int size() const { return group_ == nullptr ? 1 : group_->size(); }
  bool is_first() const { return rank() == 0; }

  /// Tells the group that a step of all ranks is over.
  void step_done() const;

  /// Writes the timelines of all ranks into one file, on rank 0.
  void write_trace(const std::filesystem::path& path) const;

  /// Throws on all ranks where `text` differs: comm::require_same.
  void require_same(const std::string& what, const std::string& text) const;

  /// Returns what all ranks are to do now, the same on each: with several ranks what any of them requested
  /// at the call before, so that a step never waits for the reduction.
  ControlRequests agree_on(const ControlRequests& requests);

  /// Sums over ranks.
  std::map<std::string, MeterSet::Sum> total(MeterSet& meters) const;
  double sum(double value) const;

  /// Runs `fn` on rank 0. Throws: on rank 0 what `fn` throws; on the others an error with its text.
  void run_on_first(const std::function<void()>& fn) const;

  /// Gives every rank what rank 0 has loaded, or found not to be there.
  std::optional<checkpoint::LoadedCheckpoint> share(std::optional<checkpoint::LoadedCheckpoint> loaded) const;

 private:
  const comm::Group* group_;
  at::Tensor reduced_requests_;  // of the last agree_on(); all ranks' maximum once reduction_ is over
  comm::Pending reduction_;
};

}  // namespace cohort::train
