// The loop of Session's header. A step that throws GenerationEnded has changed nothing but buffers, which abandon_step() restores
// before enter() shows the state to others, whether the step has its average or not. Always: entry_.steps is the number of steps whose changes are complete here.
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

  void run_alone() {
    if (options_.sync != nullptr) options_.sync->set_exchange(nullptr);
    if (options_.on_enter) options_.on_enter(entry_);
    while (entry_.steps < options_.total_steps) {
      make_step();
      ++entry_.steps;
      tell_commit();
    }
  }

  void run_with_session() {
    Session& session = *options_.session;
    enter();
    while (entry_.steps < options_.total_steps) {
      if (session.must_enter()) {
        enter();
        continue;
      }
      try {
        make_step();
      } catch (const GenerationEnded& ended) {
        base::log_debug(ended.what());
        if (options_.sync != nullptr) options_.sync->abandon_step();
        enter();
        continue;
      }
      if (options_.sync != nullptr) options_.sync->commit_step();
      session.commit(++entry_.steps);
      tell_commit();
    }
    // Who was to tell the last step may have died.
    entry_.process = session.finish().process;
    tell_commit();
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
    if (options_.sync != nullptr) {
      options_.sync->set_exchange(entry_.num_processes > 1 ? options_.session->exchange() : nullptr);
    }
    if (options_.on_enter) options_.on_enter(entry_);
    // The process that should have told it may be gone.
    tell_commit();
  }

  void tell_commit() {
    if (!options_.on_commit || entry_.process != 0 || entry_.steps == told_) return;
    told_ = entry_.steps;
    if (entry_.steps > options_.first_step) options_.on_commit(entry_.steps);
  }

  const RunOptions& options_;
  const std::function<void(StepContext&)>& step_;
  Entry entry_;
  std::uint64_t told_ = 0;
};

}  // namespace

std::shared_ptr<parallel::SliceExchange> StepContext::exchange() const {
  return session_ == nullptr ? nullptr : session_->exchange();
}

void StepContext::begin_changes() {
  has_begun_changes_ = true;
  if (session_ != nullptr) session_->begin_changes();
}

void run(const RunOptions& options, const StateAccess& state,
         const std::function<void(StepContext& context)>& step) {
  Runner runner(options, step);
  if (options.session == nullptr) return runner.run_alone();
  options.session->set_state(state);
  try {
    runner.run_with_session();
  } catch (const RunEnded& ended) {
    // It waited in reserve, or had the last steps' state, when the run succeeded.
    if (!ended.has_succeeded()) throw;
  }
}

}  // namespace cohort::elastic
