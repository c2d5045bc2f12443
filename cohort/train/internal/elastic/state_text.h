#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/elastic/session.h"
#include "cohort/train/internal/elastic/sample_ledger.h"
#include "cohort/train/internal/elastic/step_words.h"
#include "cohort/train/internal/fit/fit_control.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/internal/fit/save_policy.h"

/// The state of a fit, as processes of an elastic run give it to each other. Internal to this module.
namespace cohort::train {

/// Where a run was when its first process began: of all processes, also those that come later.
struct FitStart {
  std::int64_t step = 0, epoch = 0;
  std::string resumed_from;  ///< a checkpoint; empty: a fresh start
};

/// All but tensors that each process has right after a step: what follows a step (reports, evaluation, saves)
/// begins here, and begins here again where the processes of the run have changed meanwhile.
struct StepState {
  RunProgress run;
  SavePolicy::History saves;
  FitControl::Agreed agreed;
  StepWords words;                ///< of the step, but for its samples
  double seconds_since_save = 0;  ///< as of now, where it is a state for others
  /// Of the steps whose lines may not be on disk yet. Each process keeps them: the first one may die before
  /// it can write.
  std::vector<LedgerLine> unlisted = {};
  bool is_opened = false;  ///< process 0 has said that the run's files are open
  bool is_done = false;    ///< nothing is left: all processes have seen the end of the run
  /// Of the last epoch; right after its last step: of the one before.
  std::map<std::string, double> metrics = {};
};

/// Returns what a process has decided after its step. Where two processes have made one step, each without
/// the other, requests may have come to one of them alone.
std::string decisions_to_text(const StepState& step);
/// Throws: CommError for a text that decisions_to_text() did not make.
void take_decisions(const std::string& text, StepState& step);

/// What a snapshot holds.
struct ElasticState {
  checkpoint::CheckpointContent content;  ///< as of a checkpoint
  FitStart start;
  StepState step;  ///< but for `run`, which is in the content
};

/// Returns a flat tensor in the memory of `tensor`, in the order in which its elements lie there; a copy
/// where they do not lie together.
at::Tensor flat_alias(const at::Tensor& tensor);

/// The tensors of the snapshot alias those of `state`.
elastic::StateSnapshot to_snapshot(const ElasticState& state);
/// Throws: CommError for a snapshot that to_snapshot() did not make.
ElasticState from_snapshot(const elastic::StateSnapshot& snapshot);

}  // namespace cohort::train
