#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "cohort/comm/group.h"
#include "cohort/optim/optimizer.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/task_parts.h"

/// What a gradient sync derives from; gradient_sync.h includes it.
namespace cohort::parallel {

class VirtualRankSync;

/// The shares of a global batch that a process computes: `count` of `of`, from `first` on.
struct ShareRange {
  std::int64_t first = 0;
  std::int64_t count = 1;
  std::int64_t of = 1;
};

/// What Trainer and Task ask of a way to train on several ranks. The base is one process alone, "none".
/// Threads: one caller at a time. Collective, where there are several ranks: each function but the getters.
class GradientSync {
 public:
  virtual ~GradientSync() = default;

  /// The name in the registry; of the base "none".
  virtual std::string name() const { return "none"; }
  /// The ranks; null for one process alone.
  virtual const comm::Group* group() const { return nullptr; }
  /// This process's rank and the number of ranks; 0 and 1 without a group.
  int rank() const { return group() == nullptr ? 0 : group()->rank(); }
  int size() const { return group() == nullptr ? 1 : group()->size(); }
  /// What the loaders of this process read: one share of as many as there are ranks.
  virtual ShareRange shares() const { return {.first = rank(), .count = 1, .of = size()}; }
  /// This sync, where a process computes several shares one after the other; else null.
  virtual VirtualRankSync* virtual_ranks() { return nullptr; }

  /// Gives parameters and buffers the values of rank 0's. Throws: UsageError from "ddp" for several
  /// optimizers and ReducerOptions::hook.
  virtual void begin(const TaskParts& /*parts*/) {}
  /// The same for buffers alone: what is evaluated is what rank 0 saves.
  virtual void synchronize_buffers(const TaskParts& /*parts*/) {}
  /// Before the last backward of a step: lets gradients be averaged while it runs. average() gets the same
  /// arguments after it.
  virtual void prepare(const optim::Optimizer& /*optimizer*/, double /*samples*/, bool /*finite*/) {}
  /// After backward: makes the optimizer's gradients what one process would have computed on the joined
  /// batch. `samples`: those that this rank's mean loss was taken over. With `finite` false on any rank
  /// nothing is changed.
  virtual AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite);
  /// Makes the optimizer's step, unless `found` says that a gradient is not finite. A sync that updates
  /// parameters elsewhere overrides it.
  virtual void step(optim::Optimizer& optimizer, const optim::NonFinite& found);
};

/// A sync of ranks that each hold the whole model. Derived classes say how gradients are averaged.
class ReplicatedSync : public GradientSync {
 public:
  explicit ReplicatedSync(comm::Group group) : group_(std::move(group)) {}
  const comm::Group* group() const override { return &group_; }
  void begin(const TaskParts& parts) override;
  void synchronize_buffers(const TaskParts& parts) override;

 private:
  const comm::Group group_;
};

}  // namespace cohort::parallel
