#pragma once

#include <memory>
#include <string>

#include "cohort/comm/group.h"
#include "cohort/optim/optimizer.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/reducer_options.h"
#include "cohort/train/task_parts.h"

/// How the ranks of a run come to the same step: docs/guide/train.md, "Several ranks".
namespace cohort::train {

/// What Trainer and Task ask of a way to train on several ranks. The base is one process alone.
/// Threads: one caller at a time. Collective, where there are several ranks: each function but the getters.
class Strategy {
 public:
  virtual ~Strategy() = default;

  virtual std::string name() const { return "none"; }
  /// The ranks; null for one process alone.
  virtual const comm::Group* group() const { return nullptr; }
  int rank() const { return group() == nullptr ? 0 : group()->rank(); }
  int size() const { return group() == nullptr ? 1 : group()->size(); }

  /// Gives parameters and buffers the values of rank 0's.
  virtual void begin(const TaskParts& /*parts*/) {}
  /// The same for buffers alone: what is evaluated is what rank 0 saves.
  virtual void synchronize_buffers(const TaskParts& /*parts*/) {}
  /// Before the last backward of a step: lets the strategy average while it runs. What it was told here
  /// average() is told again.
  virtual void prepare(const optim::Optimizer& /*optimizer*/, double /*samples*/, bool /*finite*/) {}
  /// After backward: makes the optimizer's gradients what one process would have computed on the joined
  /// batch. `samples`: those that this rank's mean loss was taken over. With `finite` false on any rank
  /// nothing is changed.
  virtual parallel::AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite);
};

/// Strategies by name: "none"; "average" (GradientAverager: flat chunks after backward); "ddp" (Reducer:
/// buckets, while backward runs); "auto": ddp for a group of several ranks, else none. `options`: of ddp.
/// Throws: UsageError for another name, for "none" with several ranks, and for the others without a group.
std::shared_ptr<Strategy> make_strategy(const std::string& name, comm::Group group = {},
                                        const parallel::ReducerOptions& options = {});

}  // namespace cohort::train
