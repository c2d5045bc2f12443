#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/comm/group.h"
#include "cohort/parallel/gradient_sync_base.h"
#include "cohort/parallel/reducer_options.h"

/// Ways in which the ranks of a run come to the same step, by name: docs/guide/train.md, "Several ranks".
namespace cohort::parallel {

class VirtualRankSync;
struct VirtualRankOptions;

/// A way to keep gradients equal.
struct GradientSyncType {
  /// `group` is not null where needs_group is true. `options` are those of `ddp`; another sync may take some
  /// of them.
  std::function<std::shared_ptr<GradientSync>(const comm::Group& group, const ReducerOptions& options)> make;
  /// True: it keeps a copy of the gradients beside them, for the plan of memory.
  bool copies_gradients = false;
  /// True: gradients go through a group, also where it has one rank, and memory is planned for them on their
  /// way. False: it is for one process alone.
  bool needs_group = true;
  /// Makes the sync of a run with virtual ranks (distributed.virtual_ranks, distributed.elastic): a
  /// VirtualRankSync, or a class derived from it. `group` is null for one process, and where processes may
  /// come and leave. Null: such a run rejects this sync.
  std::function<std::shared_ptr<VirtualRankSync>(const comm::Group& group, const VirtualRankOptions& options)>
      make_virtual_ranks = nullptr;
};

/// Returns the sync of that name: "none"; "average" (GradientAverager: flat chunks after backward); "ddp"
/// (Reducer: buckets, while backward runs); "auto": ddp for a group of several ranks, else none; or a
/// registered one. Throws: UsageError for an unknown name, naming the nearest and all, for "none" with
/// several ranks, and for the others without a group.
std::shared_ptr<GradientSync> make_gradient_sync(const std::string& name, comm::Group group = {},
                                                 const ReducerOptions& options = {});

/// Returns the sync of that name for virtual ranks. `group`: null for one process. Throws: UsageError for an
/// unknown name, or one whose type has no make_virtual_ranks.
std::shared_ptr<VirtualRankSync> make_virtual_rank_sync(const std::string& name, const comm::Group& group,
                                                        const VirtualRankOptions& options);

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
