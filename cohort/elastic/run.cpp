// The loop of Session's header. A step that throws GenerationEnded has changed nothing but buffers, which
// abandon_step() restores before enter() shows the state to others, whether the step has its average or not.
// Always: info_.steps is the number of steps whose changes are complete here.
//
// on_enter may make a group, for which all processes of the generation have to call it. Those that wait in
// Session::finish() do not, and who enters beside one of them gets its state, that of the last step. So no
// process calls on_enter where all steps are made.
#include "cohort/elastic/run.h"

#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::elastic {
namespace {

/// One process's way through a run.
class Runner {
 public:
  Runner(const RunOptions& options, const std::function<void(StepContext&)>& step)
      : options_(options), step_(step) {
    info_.steps = options.first_step;
  }

  GenerationInfo run_alone() {
    if (options_.sync != nullptr) options_.sync->set_exchange(nullptr);
    call_on_enter();
    while (info_.steps < options_.total_steps) {
      make_step();
      ++info_.steps;
      report_commit();
    }
    return info_;
  }

  GenerationInfo run_with_session() {
    Session& session = *options_.session;
    bool is_in_generation = false;
    while (!is_in_generation || info_.steps < options_.total_steps) {
      try {
        if (!is_in_generation || session.must_enter()) {
          is_in_generation = false;
          enter();
          is_in_generation = true;
          continue;
        }
        make_step();
        if (options_.sync != nullptr) options_.sync->commit_step();
        session.commit(++info_.steps);
        report_commit();
      } catch (const GenerationEnded& ended) {  // also of what the caller's functions exchange
        base::log_debug(ended.what());
        if (options_.sync != nullptr) options_.sync->abandon_step();
        is_in_generation = false;
      }
    }
    const GenerationInfo last = session.finish();
    info_.generation = last.generation;
    info_.process = last.process;
    info_.num_processes = last.num_processes;
    // Process 0 of before may have died.
    report_commit();
    return info_;
  }

 private:
  void make_step() {
    StepContext context(info_.steps, info_, options_.session);
    if (const auto exchange = context.exchange()) exchange->begin_step();
    step_(context);
    if (context.has_begun_changes()) return;
    throw UsageError("elastic.run", base::concat("step ", info_.steps, " did not say when its changes began"),
                     "context.begin_changes() before optimizer.step()");
  }

  void enter() {
    info_ = options_.session->enter(info_.steps);
    has_copied_ = has_copied_ || info_.has_copied;
    if (options_.sync != nullptr) {
      options_.sync->set_exchange(info_.num_processes > 1 ? options_.session->exchange() : nullptr);
    }
    call_on_enter();
    report_commit();  // process 0 of before may be gone
  }

  void call_on_enter() {
    if (options_.on_enter && info_.steps < options_.total_steps) options_.on_enter(info_);
  }

  void report_commit() {
    if (!options_.on_commit || info_.process != 0 || info_.steps == reported_) return;
    // The state at the start is of no step of this run, unless it came from another process.
    const bool is_start = info_.steps == 0 || (info_.steps == options_.first_step && !has_copied_);
    if (!is_start) options_.on_commit(info_);
    reported_ = info_.steps;
  }

  const RunOptions& options_;
  const std::function<void(StepContext&)>& step_;
  GenerationInfo info_;
  std::uint64_t reported_ = 0;  // steps
  bool has_copied_ = false;
};

}  // namespace

std::shared_ptr<parallel::SliceExchange> StepContext::exchange() const {
  return session_ == nullptr ? nullptr : session_->exchange();
}

void StepContext::begin_changes() {
  has_begun_changes_ = true;
  if (session_ != nullptr) session_->begin_changes();
}

std::optional<GenerationInfo> run(const RunOptions& options, const StateAccess& state,
                                  const std::function<void(StepContext& context)>& step) {
  Runner runner(options, step);
  if (options.session == nullptr) return runner.run_alone();
  options.session->set_state(state);
  try {
    return runner.run_with_session();
  } catch (const RunEnded& ended) {
    // The run succeeded while it was in no generation.
    if (!ended.has_succeeded()) throw;
    return std::nullopt;
  }
}

}  // namespace cohort::elastic
