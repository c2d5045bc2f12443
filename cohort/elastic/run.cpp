// The loop of Session's header. A step that throws GenerationEnded has changed nothing but buffers, which abandon_step() restores
// before enter() shows the state to others, whether the step has its average or not. Always: entry_.steps is the number of
// steps whose changes are complete here.
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
    entry_.steps = options.first_step;
  }

  Entry run_alone() {
    if (options_.sync != nullptr) options_.sync->set_exchange(nullptr);
    if (options_.on_enter) options_.on_enter(entry_);
    while (entry_.steps < options_.total_steps) {
      make_step();
      ++entry_.steps;
      report_commit();
    }
    return entry_;
  }

  Entry run_with_session() {
    Session& session = *options_.session;
    bool is_in_generation = false;
    while (!is_in_generation || entry_.steps < options_.total_steps) {
      try {
        if (!is_in_generation || session.must_enter()) {
          is_in_generation = false;
          enter();
          is_in_generation = true;
          continue;
        }
        make_step();
        if (options_.sync != nullptr) options_.sync->commit_step();
        session.commit(++entry_.steps);
        report_commit();
      } catch (const GenerationEnded& ended) {  // also of what the caller's functions exchange
        base::log_debug(ended.what());
        if (options_.sync != nullptr) options_.sync->abandon_step();
        is_in_generation = false;
      }
    }
    const Entry last = session.finish();
    entry_.generation = last.generation;
    entry_.process = last.process;
    entry_.num_processes = last.num_processes;
    // Process 0 of before may have died.
    report_commit();
    return entry_;
  }

 private:
  void make_step() {
    StepContext context(entry_.steps, entry_, options_.session);
    step_(context);
    if (context.has_begun_changes()) return;
    throw UsageError("elastic.run",
                     base::concat("step ", entry_.steps, " did not say when its changes began"),
                     "context.begin_changes() before optimizer.step()");
  }

  void enter() {
    entry_ = options_.session->enter(entry_.steps);
    has_copied_ = has_copied_ || entry_.has_copied;
    if (options_.sync != nullptr) {
      options_.sync->set_exchange(entry_.num_processes > 1 ? options_.session->exchange() : nullptr);
    }
    if (options_.on_enter) options_.on_enter(entry_);
    report_commit();  // process 0 of before may be gone
  }

  void report_commit() {
    if (!options_.on_commit || entry_.process != 0 || entry_.steps == reported_) return;
    // The state at the start is of no step of this run, unless it came from another process.
    const bool is_start = entry_.steps == 0 || (entry_.steps == options_.first_step && !has_copied_);
    if (!is_start) options_.on_commit(entry_);
    reported_ = entry_.steps;
  }

  const RunOptions& options_;
  const std::function<void(StepContext&)>& step_;
  Entry entry_;
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

std::optional<Entry> run(const RunOptions& options, const StateAccess& state,
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
