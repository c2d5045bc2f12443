#pragma once

#include <compare>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/internal/fit/save_policy.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// The checkpoints of a fit: which it resumes from, when one is due, and where it is written.
class RunSaver {
 public:
  /// Both must outlive this. Throws: UsageError for an unknown format.
  RunSaver(const TrainerOptions& options, const RankCoordinator& ranks);

  /// When the run saves.
  SavePolicy policy;

  /// The run has a folder: all ranks take part in a save.
  bool saves() const { return !options_.run_dir().empty(); }
  /// This rank writes it.
  bool writes() const { return saves() && ranks_.is_first(); }
  /// The checkpoint that was written or resumed from last; empty: none.
  const std::filesystem::path& last() const { return last_; }

  /// Where an elastic run goes back to, once: its options name another checkpoint than the last one. Else
  /// empty.
  std::string goes_back_to() const;

  /// Returns the checkpoint that the options say to resume from, if any; its best is that of an evaluation on
  /// `eval_data`. Collective. Throws: UsageError without a run folder; DataError where it is not there or
  /// cannot be used; on other ranks than rank 0, as comm::run_on_rank0_and_broadcast() for what rank 0 threw.
  std::optional<checkpoint::LoadedCheckpoint> find(const DataOfRun& eval_data);

  /// The first step of this start was made: a kill from here on resumes from `resumed_from` (empty: it is
  /// where it is). Makes the run folder, on the rank that writes.
  void start_counts(const std::filesystem::path& resumed_from);

  /// Another process may have written since: no checkpoint is known to be there.
  void forget_written() { written_.clear(); }

  /// Writes a checkpoint of `task` and `state`, on the rank that writes; nothing where it has done so.
  void write(const Task& task, const RunState& state, bool is_best);

 private:
  std::optional<checkpoint::LoadedCheckpoint> load(const std::string& from) const;
  std::optional<checkpoint::LoadedCheckpoint> load_later_than_start() const;

  const TrainerOptions& options_;
  const RankCoordinator& ranks_;
  std::optional<checkpoint::RunCheckpoints> checkpoints_;  // null: the run has no folder
  std::filesystem::path last_;

  /// A checkpoint. After the last step of a run two may have one name: before its evaluation, and after it.
  struct Written {
    std::int64_t step = 0, reported_step = 0;
    bool is_best = false;
    std::string name = {};
    auto operator<=>(const Written&) const = default;
  };
  std::set<Written> written_;  // of the last step that was saved
};

}  // namespace cohort::train
