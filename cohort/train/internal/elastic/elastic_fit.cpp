// A step is committed when its sum has changed the parameters, and what follows it (reports, evaluation,
// saves) is a function of the state right after it. So that state is kept, without tensors, which nothing
// changes until the next step. Where the processes change, each of them goes back there, and all do again
// what follows. Process 0 takes part in step M + 1 only when it has written all that belongs to step M. So a
// process that becomes the first one owes at most that of the last step. The end of a run is a transaction
// too: its number is one more than the last step's.
#include "cohort/train/internal/elastic/elastic_fit.h"

#include <ATen/Parallel.h>

#include <set>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "cohort/train/internal/fit/rates.h"

namespace cohort::train {
namespace {

constexpr const char* kWhereElastic = "train.elastic";

void check_elastic_task(const Task& task) {
  if (task.optimizers().size() > 1) {
    throw UsageError(
        kWhereElastic,
        base::concat("the task has ", task.optimizers().size(),
                     " optimizers, and a step of an elastic run is one transaction: the average of the "
                     "second could fail when the first has changed its parameters"),
        "one optimizer with several parameter groups");
  }
  for (const parallel::NamedModule& entry : task.modules()) {
    for (const auto& parameter : entry.module->named_parameters()) {
      if (parameter.value().is_cpu()) continue;
      throw UsageError(
          kWhereElastic,
          base::concat("parameter ", parameter.key(), " is on ", parameter.value().device().str(),
                       ", and an elastic run computes on the CPU"),
          "train.device=cpu");
    }
  }
}

}  // namespace

ElasticFit::ElasticFit(const Parts& parts) : parts_(parts) {
  check_elastic_task(parts_.task);
}

ElasticFit::~ElasticFit() {
  parts_.sync.set_step_hooks({});
}

void ElasticFit::begin() {
  state_.run = parts_.progress.state;
  parts_.sync.set_step_hooks(
      {.text = [this] { return parts_.ranks.own_words(parts_.task.take_reported_metrics()); },
       .before_changes =
           [this](const std::vector<std::string>& texts) {
             StepWords words = StepWords::of_all(texts);
             parts_.ranks.session().begin_changes();
             parts_.ranks.hear(std::move(words));
           }});
  parts_.ranks.session().set_state({.save = [this] { return save(); },
                                    .load = [this](const elastic::StateSnapshot& state) { load(state); }});
}

void ElasticFit::resume(const FitStart& start) {
  start_ = start;
  parts_.progress.total_meters();
  state_.run = parts_.progress.state;
  parts_.ranks.session().commit(committed());
}

std::uint64_t ElasticFit::committed() const {
  return static_cast<std::uint64_t>(state_.run.step) + (state_.is_done ? 1 : 0);
}

void ElasticFit::enter() {
  elastic::Session& session = parts_.ranks.session();
  const elastic::GenerationInfo before = parts_.ranks.info();
  const elastic::GenerationInfo info = session.enter(committed());
  if (info.steps != committed()) {
    throw CommError(kWhereElastic, base::concat("generation ", info.generation, " is after step ", info.steps,
                                                ", and this process has the state after ", committed()));
  }
  parts_.ranks.set_info(info);
  parts_.sync.set_exchange(session.exchange());
  // Where it stays the first one from one generation to the next, nobody else has written.
  const bool stays_first = before.process == 0 && info.process == 0 &&
                           info.generation == before.generation + 1 && !info.has_copied;
  if (!stays_first) opens_ = true;
  if (!state_.is_done) {
    parts_.ranks.compare();
    take_decisions_of_first();
  }
  go_back();
  if (state_.is_done) return;
  if (info.process == 0) {
    base::log_info(
        base::concat("generation ", info.generation, ", after step ", info.steps, ": ",
                     parallel::describe_virtual_ranks(parts_.sync.num_virtual_ranks(), info.num_processes)));
  }
}

// A process that alone has committed a step, and was cut off, may have heard requests with it that the others
// have not: they made the step again without them. Then it would stop, and the others continue. What only it
// has heard, it asks for again.
void ElasticFit::take_decisions_of_first() {
  RankCoordinator::ControlRequests lost = state_.words.requests;
  take_decisions(parts_.ranks.text_of_first(decisions_to_text(state_)), state_);
  const RankCoordinator::ControlRequests& heard = state_.words.requests;
  if (heard.stop_signal != 0) lost.stop_signal = 0;
  lost.save_now &= !heard.save_now;
  lost.save_due &= !heard.save_due;
  parts_.ranks.request(lost);
}

void ElasticFit::go_back() {
  parts_.progress.go_back_to(state_.run);
  parts_.saver.policy.set_history(state_.saves);
  parts_.control.set_agreed(state_.agreed);
  parts_.ranks.go_back_to(state_.words);
  // The rates of the step that was given up are not those of the last one.
  if (has_step()) apply_schedules(parts_.task, state_.run.step - 1);
  set_shares(parts_.train);
  if (parts_.eval != nullptr) set_shares(*parts_.eval);
}

void ElasticFit::set_shares(data::Loader& loader) const {
  const parallel::ShareRange shares = parts_.sync.shares();
  loader.set_epoch(loader.state().epoch);  // parts of a batch may not have been taken
  loader.set_shares(shares.first, shares.count);
}

// An operator adds in another order on another number of threads.
void ElasticFit::use_threads(int threads) {
  if (threads != at::get_num_threads()) {
    base::log_warning(base::concat("this process computes with ", threads,
                                   " threads, as all others of the run, and not ", at::get_num_threads()));
    at::set_num_threads(threads);
  }
  parts_.progress.state.threads = threads;
}

bool ElasticFit::take_opening() {
  return parts_.ranks.is_first() && std::exchange(opens_, false);
}

FitInfo ElasticFit::describe_opening(FitInfo start) const {
  start.processes = parts_.ranks.size();
  start.origin = parts_.ranks.info().origin;
  start.first_epoch = start_.epoch;
  start.first_step = start_.step;
  start.resumed = !start_.resumed_from.empty();
  // The report of the last step may not have been written; what is before has been, unless nobody could open
  // the files.
  if (state_.is_opened && state_.run.step > start_.step + 1) {
    start.first_epoch = state_.run.epoch;
    start.first_step = state_.run.step - 1;
    start.resumed = start.continues = true;
  }
  return start;
}

void ElasticFit::commit(const std::map<std::string, double>& metrics) {
  parts_.sync.commit_step();
  parts_.progress.total_meters();
  const RunState& run = parts_.progress.state;
  StepWords words = parts_.ranks.heard();
  std::vector<LedgerLine> unlisted = std::move(state_.unlisted);
  std::erase_if(unlisted, [&](const LedgerLine& line) { return line.step <= words.num_listed; });
  LedgerLine line{.step = run.step, .epoch = run.epoch + 1, .samples = std::exchange(words.samples, {})};
  // Without a folder nobody writes them.
  if (parts_.saver.saves()) unlisted.push_back(std::move(line));
  const bool is_opened = state_.is_opened || words.is_opened;
  state_ = {.run = run,
            .saves = parts_.saver.policy.history(),
            .agreed = parts_.control.agreed(),
            .words = std::move(words),
            .unlisted = std::move(unlisted),
            .is_opened = is_opened,
            .metrics = metrics};
  parts_.ranks.session().commit(committed());
}

void ElasticFit::end(const std::map<std::string, double>& metrics) {
  // Process 0 takes part when it has written everything.
  parallel::all_gather_texts(parts_.ranks.session().exchange().get(), "end");
  // A process that copies it tells the same result.
  parts_.progress.total_meters();
  state_.run = parts_.progress.state;
  state_.saves = parts_.saver.policy.history();
  state_.agreed = parts_.control.agreed();
  state_.is_done = true;
  state_.metrics = metrics;
  parts_.ranks.session().commit(committed());
}

elastic::StateSnapshot ElasticFit::save() const {
  RunState run = parts_.progress.state;
  static_cast<RunProgress&>(run) = state_.run;
  StepState step = state_;
  // Before the first step processes compare their states, and clocks would differ.
  if (!is_at_start()) step.seconds_since_save = parts_.saver.policy.seconds_since_save();
  elastic::StateSnapshot snapshot =
      to_snapshot({.content = capture(parts_.task, run), .start = start_, .step = std::move(step)});
  // Forward changes buffers: all else that a step changes, it changes once it has its sum.
  std::set<const c10::StorageImpl*> buffers;
  for (const parallel::NamedModule& entry : parts_.task.modules()) {
    for (const at::Tensor& buffer : entry.module->buffers()) {
      if (buffer.defined() && buffer.has_storage()) buffers.insert(buffer.storage().unsafeGetStorageImpl());
    }
  }
  for (const at::Tensor& tensor : snapshot.tensors) {
    snapshot.in_place.push_back(tensor.has_storage() &&
                                !buffers.contains(tensor.storage().unsafeGetStorageImpl()));
  }
  return snapshot;
}

void ElasticFit::load(const elastic::StateSnapshot& snapshot) {
  ElasticState state = from_snapshot(snapshot);
  parts_.progress.state = restore(parts_.task, state.content);
  state_ = std::move(state.step);
  state_.run = parts_.progress.state;
  start_ = std::move(state.start);
  parts_.saver.policy.set_seconds_since_save(state_.seconds_since_save);
  use_threads(parts_.progress.state.threads);
}

}  // namespace cohort::train
