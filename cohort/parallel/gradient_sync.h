#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/comm/group.h"
#include "cohort/optim/optimizer.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/reducer_options.h"
#include "cohort/parallel/task_parts.h"

/// Ways in which the ranks of a run come to the same step, by name: docs/guide/train.md, "Several ranks".
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

/// A way to keep gradients equal.
struct GradientSyncType {
  /// `group` is not null. `options` are those of `ddp`; another sync may take some of them.
  std::function<std::shared_ptr<GradientSync>(const comm::Group& group, const ReducerOptions& options)> make;
  /// True: it keeps a copy of the gradients beside them, for the plan of memory.
  bool copies_gradients = false;
};

/// Returns the sync of that name: "none"; "average" (GradientAverager: flat chunks after backward); "ddp"
/// (Reducer: buckets, while backward runs); "auto": ddp for a group of several ranks, else none; or a
/// registered one. Throws: UsageError for an unknown name, naming the nearest and all, for "none" with
/// several ranks, and for the others without a group.
std::shared_ptr<GradientSync> make_gradient_sync(const std::string& name, comm::Group group = {},
                                                 const ReducerOptions& options = {});

/// Returns the name that `name` stands for. "auto" is "none" for one rank, and `of_runner` for several:
/// ModelRunnerType::gradients. Any other name stands for itself.
std::string resolve_gradients(const std::string& name, int num_ranks, const std::string& of_runner = "ddp");

/// Returns all names, sorted.
std::vector<std::string> gradient_sync_names();
/// Returns the type of that name. Throws: UsageError for an unknown name, or one that two libraries
/// registered.
GradientSyncType gradient_sync_type(const std::string& name);

/// Makes `type` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_gradient_sync(const std::string& name, GradientSyncType type);

/// What COHORT_REGISTER_GRADIENT_SYNC calls while a library loads: a name that is taken stays with the first,
/// and make_gradient_sync throws, naming both places.
bool register_gradient_sync_at_load(const char* name, GradientSyncType type, const char* file,
                                    int line) noexcept;

}  // namespace cohort::parallel

/// Registers a gradient sync where it is written, at namespace scope.
#define COHORT_REGISTER_GRADIENT_SYNC(name, ...) \
  COHORT_REGISTER_AT_LOAD(parallel::register_gradient_sync_at_load, name, __VA_ARGS__)
