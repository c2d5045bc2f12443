#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::elastic {

/// What run() needs beside the state and the step.
struct RunOptions {
  std::uint64_t total_steps = 0;
  std::uint64_t first_step = 0;  ///< steps of the state at the start, as of a checkpoint
  /// Null: this process is alone, and the steps have the same bits.
  std::shared_ptr<Session> session = session_of_process();
  /// Gets the processes of each generation; may be null. It must outlive run().
  parallel::VirtualRankSync* sync = nullptr;
  /// Called after each change, before the next step: to set what the loader reads, for instance. Not called
  /// where all steps are made, also of a process that comes then: others no longer call it, so it would wait
  /// for them in a group. The result of run() has what is of the last generation.
  std::function<void(const GenerationInfo& info)> on_enter = {};
  /// Called on process 0 when `info.steps` are committed, before the next step begins: to write what is
  /// written once. A step may come twice, from two processes, where the first one dies. None is left out. A
  /// process that was stopped may come late, when another one is process 0, and would write over what is
  /// newer: WriterFence (writer_fence.h) keeps it out.
  std::function<void(const GenerationInfo& info)> on_commit = {};
};

/// What a step function is given.
class StepContext {
 public:
  StepContext(std::uint64_t step, const GenerationInfo& info, std::shared_ptr<Session> session)
      : step_(step), info_(info), session_(std::move(session)) {}

  std::uint64_t step() const { return step_; }
  const GenerationInfo& info() const { return info_; }
  /// Null where this process is alone.
  std::shared_ptr<parallel::SliceExchange> exchange() const;
  /// To be called once all that comes from other processes is there, and before parameters, optimizer or
  /// anything else of the state changes.
  void begin_changes();
  bool has_begun_changes() const { return has_begun_changes_; }

 private:
  const std::uint64_t step_;
  const GenerationInfo& info_;
  const std::shared_ptr<Session> session_;
  bool has_begun_changes_ = false;
};

/// Makes steps until there are `total_steps`, through all changes of the run's processes, and returns on each
/// process once the run has ended. A process makes one run with its session. The step function makes step
/// `step()` for the virtual ranks of this process. It is called again for a step where processes have changed
/// meanwhile: so it must depend on nothing but the state and the step's number, with generators seeded by
/// (seed, step, virtual rank). What it throws ends the process's part in the run. GenerationEnded, also of
/// on_enter and on_commit, makes the process enter the next generation.
///
/// Returns that of the process's last generation, with the final state. Nothing where the run has ended while
/// the process was in no generation: it has an earlier state.
///
///     parallel::VirtualRankSync sync({}, {.num_virtual_ranks = 4});
///     sync.begin({.modules = {{"", net.ptr()}}, .optimizers = {{"", optimizer, nullptr}}});
///     elastic::run({.total_steps = 1000, .sync = &sync}, elastic::state_of(net.ptr(), optimizer),
///                  [&](elastic::StepContext& context) {
///                    sync.begin_step();
///                    ...                                  // parallel/virtual_ranks/virtual_rank_sync.h
///                    sync.average(*optimizer, samples, true);
///                    context.begin_changes();
///                    optimizer->step();
///                  });
///
/// Throws: as Session::enter(); UsageError where a step did not call begin_changes(), and for a second run
/// with one session.
std::optional<GenerationInfo> run(const RunOptions& options, const StateAccess& state,
                                  const std::function<void(StepContext& context)>& step);

}  // namespace cohort::elastic
