// The loop waits for its ranks, for signals and for news of the rendezvous together. News go to the ranks as
// one order, and what the ranks say goes to the other agents as one status: both are whole each time, so
// nothing depends on what was said before.
//
// A rank that ends before the run does is a loss of the generation: this node stays in that generation, as
// its status says, until the next one comes. Its successor starts meanwhile. A node that leaves waits for its
// ranks to leave the generation, as the others may finish their step with them.
#include "cohort/launch/internal/members/elastic_agent.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/members/run_end.h"

namespace cohort::launch {
namespace {

using base::concat;
using base::LogLevel;
using membership::RankStatus;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr auto kWordTime =
    seconds(2);  // for ranks to end by themselves once they know that the run has failed

// One that has ended with status 0 before the run has failed too.
RankFailure failure_of(const ElasticRanks::End& end) {
  if (end.failure) return *end.failure;
  RankFailure failure;
  failure.local_rank = static_cast<int>(end.place);
  failure.what = "ended with status 0, before the run had ended";
  return failure;
}

}  // namespace

ElasticAgent::ElasticAgent(const RunOptions& options, MemberLink& member, const AgentParts& parts)
    : MemberAgent(options, member, parts),
      ranks_(options, parts, output_.display()),
      shutdown_(ranks_, output_, options.shutdown_timeout),
      hung_(options.rendezvous.silence),
      watch_(options.rendezvous.enter_timeout, options.rendezvous.progress_timeout) {}

bool ElasticAgent::is_over() const {
  return (member_.is_over() || shutdown_.has_begun() || is_leaving() || leave_.must_kill()) &&
         !ranks_.running();
}

void ElasticAgent::wait() {
  // However seldom the notice file is looked for: a longer pause counts as one in which the agent was stopped
  // (kLongestPause).
  const auto most = std::min<std::chrono::nanoseconds>(
      {options_.monitor_interval, std::chrono::milliseconds(kLongestPause) / 4, shutdown_.grace_left()});
  const std::vector<int> wake{parts_.signals.fd(), member_.fd()};
  for (const ElasticRanks::End& end : ranks_.step(std::chrono::ceil<milliseconds>(most), wake)) note_end(end);
}

void ElasticAgent::note_end(const ElasticRanks::End& end) {
  RankFailure failure = failure_of(end);
  failure.local_rank = static_cast<int>(end.place);
  const bool was_over = member_.is_over() || shutdown_.has_begun() || leave_.must_kill();
  if ((was_over || is_leaving()) && end_.status == 0) end_.status = end.status;
  const std::uint64_t generation = member_.generation();
  if (is_leaving() && generation == 0) return;  // it knows that nobody waits for it
  int world_size = options_.nproc_per_node;
  if (generation != 0) {
    const membership::Generation& current = member_.view().record->generation;
    world_size = current.num_processes();
    failure.node = static_cast<int>(current.find(member_.view().id) - current.members.data());
    failure.rank = current.first_process(member_.view().id) + static_cast<int>(end.place);
  }
  if (was_over) {
    // After a run that has succeeded nothing else says so. After a signal ranks end with its status.
    const bool is_of_stop = member_.stop_signal() != 0 && end.status == 128 + member_.stop_signal();
    if (end.failure && !is_of_stop && !shutdown_.has_begun() && member_.has_succeeded()) {
      output_.log(LogLevel::kError, describe({failure}, world_size));
    }
    return;
  }
  output_.log(LogLevel::kWarning, describe({failure}, world_size));
  if (generation != 0) times_.note_cause(Clock::now(), end.alive_at);
  note_failure(failure, end.place, std::max(member_.status().committed_steps, end.committed_steps));
  report_ranks(ranks_.observe());  // before a successor starts, which takes milliseconds
  base::reach_fault_point("loss reported");
  start_successors();
}

void ElasticAgent::note_failure(const RankFailure& failure, std::size_t place,
                                std::uint64_t committed_steps) {
  const std::uint64_t generation = member_.generation();
  const int num_in_a_row = failures_.note(place, committed_steps, Clock::now());
  const bool is_hopeless = !options_.limits_restarts() && num_in_a_row > PlaceFailures::kMaxInARow;
  if (is_hopeless) {
    output_.log(LogLevel::kError, concat("local rank ", place, " has failed ", num_in_a_row,
                                         " times in a row, and no step was made between"));
  }
  if (generation == 0) {  // nobody else counts what ends before it takes part
    if (is_hopeless || ++end_.num_lost > options_.max_restarts) give_up(failure.status);
    return;
  }
  if (!loss_) loss_ = {generation, summarize(failure), failure.status};
  loss_->ends_run = loss_->ends_run || is_hopeless;
}

void ElasticAgent::give_up(int status) {
  end_.status = status;
  end_.has_given_up = true;
  output_.log(LogLevel::kError, "this node leaves the run");
  report_leaving();
  shutdown_.stop();
}

void ElasticAgent::report_leaving() {
  membership::MemberStatus status = member_.status();
  status.is_leaving = true;
  member_.set_status(status);
}

void ElasticAgent::start_successors() {
  const bool is_hopeless = loss_ && loss_->ends_run;  // the agents decide what becomes of this node
  if (is_hopeless || is_leaving() || shutdown_.has_begun()) return;
  for (std::size_t place = 0; place < static_cast<std::size_t>(options_.nproc_per_node); ++place) {
    if (!failures_.take_due(place, Clock::now())) continue;
    try {
      ranks_.replace(place);
    } catch (const SystemError& error) {  // the other ranks of this node live on
      RankFailure failure;
      failure.local_rank = static_cast<int>(place);
      failure.status = 1;
      failure.what = concat("cannot be started: ", base::message_of(error));
      output_.log(LogLevel::kWarning, concat("local rank ", place, " ", failure.what));
      note_failure(failure, place, member_.status().committed_steps);
    }
  }
}

void ElasticAgent::follow() {
  const bool is_late_to_save = end_.save_by.expired();
  const bool is_news = take_news();
  if (is_news || is_late_to_save || do_ranks_leave() != end_.is_leaving) publish_order();
  if (is_late_to_save) end_.save_by = base::Deadline::never();
  const std::vector<ObservedRank> ranks = ranks_.observe();
  report_ranks(ranks);
  // Others wait for a rank that is to enter a generation: whether it runs is seen by its answers.
  if (ask_by_.expired() && std::ranges::any_of(ranks, &ObservedRank::is_behind)) publish_order();
  start_successors();
  end_hung_rank(ranks);
  end_ranks();
}

void ElasticAgent::publish_order() {
  if (may_save()) return;
  ask_by_ = base::Deadline(options_.rendezvous.silence);
  const membership::MemberView& view = member_.view();
  membership::RankOrder order;
  order.revision = view.revision;
  order.has_ended = member_.is_over();
  order.has_succeeded = member_.has_succeeded();
  order.stop_signal = member_.stop_signal();
  order.is_leaving = end_.is_leaving = do_ranks_leave();
  order.end_cause = view.failure;
  if (view.record) {
    order.origin = view.record->origin;
    order.generation = view.record->generation.for_ranks(member_.status().committed_steps);
    if (order.end_cause.empty()) order.end_cause = view.record->end_cause;
  }
  if (const std::uint64_t number = member_.generation(); number != 0) {
    order.process = order.generation.first_process(view.id);
    if (std::exchange(end_.generation, number) != number) {
      log_change(
          times_.note_generation(number, order.generation.cause, order.generation.detect_ms, Clock::now()));
    }
  }
  // What has not taken part must not act as if it had: it lacks the state.
  if (order.has_succeeded) ranks_.drop_unfinished();
  ranks_.publish(order);
}

void ElasticAgent::report_ranks(const std::vector<ObservedRank>& ranks) {
  const std::uint64_t generation = member_.generation();
  if (loss_ && loss_->generation != generation) {
    const bool is_out = generation == 0 && !member_.is_over() && !shutdown_.has_begun();
    if (loss_->ends_run && is_out) give_up(loss_->exit_status);  // the others continue
    loss_.reset();
  }
  std::vector<RankStatus> statuses;
  const Clock::time_point now = Clock::now();
  std::uint64_t recovered = generation, stepped = generation, state_bytes = 0;
  for (const ObservedRank& rank : ranks) {
    const RankStatus& status = statuses.emplace_back(rank.status);
    if (status.entered == generation && !status.lost_links.empty()) times_.note_cause(now, std::nullopt);
    recovered = std::min(recovered, status.recovered);
    stepped = std::min(stepped, status.stepped);
    state_bytes += status.state_bytes;
  }
  if (std::exchange(end_.state_bytes, state_bytes) < state_bytes) leave_.extend();
  if (!shutdown_.has_begun()) {
    for (const std::string& line : watch_.note(ranks, now)) output_.log(LogLevel::kWarning, line);
  }
  membership::MemberStatus status = fold_ranks(member_.status(), statuses, loss_);
  status.stuck = watch_.stuck();
  status.is_ready = status.is_ready && status.stuck.empty() && !leave_.is_late();
  member_.set_status(status);
  // While a change is under way, to start a process would hold it up, with its first step.
  if (!loss_ && generation != 0 && stepped == generation) ranks_.fill_reserve();
  log_change(times_.note_ranks(recovered, stepped, now));
  if (status.is_finished) log_change(times_.finish());
}

void ElasticAgent::end_hung_rank(const std::vector<ObservedRank>& ranks) {
  if (member_.is_over() || shutdown_.has_begun() || leave_.has_begun() || loss_) return;
  const Clock::time_point now = Clock::now();
  if (const auto mute = hung_.find_mute(ranks, now)) {
    output_.log(
        LogLevel::kWarning,
        concat(
            "local rank ", *mute,
            " has said nothing to its agent for 30 s, so this node does not take part: is "
            "the program elastic? (cohort train: distributed.elastic=true; another one: elastic::Session)"));
  }
  const auto found = hung_.find_hung(member_.generation(), member_.view().id, ranks, now);
  if (!found) return;
  if (found->is_traced) {
    output_.log(LogLevel::kWarning, concat("local rank ", found->place,
                                           " is under a debugger, so it has no successor: ", found->why));
    return;
  }
  output_.log(LogLevel::kWarning,
              concat("local rank ", found->place, " is killed, and has a successor: ", found->why));
  ranks_.end_place(found->place);
}

void ElasticAgent::log_change(const std::string& line) {
  if (!line.empty()) output_.log(LogLevel::kInfo, line);
}

void ElasticAgent::end_ranks() {
  if (!shutdown_.has_begun()) {
    if (leave_.has_begun() && leave_.is_out()) {
      if (end_.stop_by.is_never()) end_.stop_by = base::Deadline(options_.shutdown_timeout / 4);
      if (leave_.ends_run() || have_left() || end_.stop_by.expired()) shutdown_.pass_on(leave_.signal());
    } else if (member_.is_over() && !member_.has_succeeded()) {
      if (end_.stop_by.is_never()) end_.stop_by = base::Deadline(kWordTime);
      if (end_.stop_by.expired()) shutdown_.stop();
    }
  }
  shutdown_.kill_when_due(leave_.must_kill());
}

// All members leave, so the run has ended: ranks get the signal first, and save what all have, with those of
// other nodes: they stay in their generation. One that waits for another one hears of the end later.
bool ElasticAgent::may_save() {
  if (!leave_.has_begun() || !member_.has_ended() || member_.has_succeeded()) return false;
  if (!end_.may_save) return false;
  if (end_.save_by.is_never()) end_.save_by = base::Deadline(options_.shutdown_timeout / 2);
  end_.may_save = !end_.save_by.expired();
  return end_.may_save;
}

// Whether no other node waits for a rank of this one.
bool ElasticAgent::have_left() const {
  if (member_.is_over() || member_.generation() != 0 || !member_.view().record) return true;
  const std::uint64_t number = member_.view().record->generation.number;
  return std::ranges::all_of(ranks_.observe(), [&](const ObservedRank& rank) {
    return rank.status.entered == 0 || rank.status.left >= number;
  });
}

// Ranks that end by a signal do not end the run. Where this node gives up it may be the last one that can end
// the run.
void ElasticAgent::announce_leave() {
  report_leaving();
  const auto is_known = [&] { return member_.is_over() || (end_.has_given_up && member_.view().id == 0); };
  const base::Deadline deadline{kWordTime};
  while (!is_known() && !deadline.expired()) {
    pollfd news{member_.fd(), POLLIN, 0};
    base::wait_for_files({&news, 1}, deadline);
    member_.update();
  }
}

int ElasticAgent::finish() {
  base::reach_fault_point("agent ends");
  if (end_.has_given_up) {
    announce_leave();
    return end_.status;
  }
  if (leave_.has_begun()) {
    if (leave_.ends_run()) announce_leave();
    // A run that a signal has stopped has one status, whatever signal this node got.
    const bool is_stopped = member_.stop_signal() != 0;
    const int signal = is_stopped ? member_.stop_signal() : leave_.signal();
    // Ranks that have ended by themselves, as their node leaves, have not finished.
    const bool has_left = end_.is_leaving && end_.status == 0 && !member_.has_succeeded();
    const int status = is_stopped || leave_.must_kill() || has_left ? 128 + signal : end_.status;
    output_.report({.restart = false, .status = status, .signal = signal, .failures = {}}, 0, 0, 0);
    return status;
  }
  const int status = status_of_end(member_, output_);
  return status != 0 ? status : end_.status;
}

}  // namespace cohort::launch
