// The loop waits for its ranks, for signals and for news of the rendezvous together. What it does follows
// from what it sees: ranks of a generation that is not the newest are ended; without ranks it starts those of
// the newest, if it is a member. So each order of events leads to the same place.
//
// A rank that fails is told to the agent that decides, which makes another generation or ends the run. A
// failure that is seen after the next generation has come is no news: the ranks of that node were ended, and
// others lost them.
#include "cohort/launch/internal/members/restarting_agent.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/members/run_end.h"
#include "cohort/launch/internal/worker_shutdown.h"

namespace cohort::launch {
namespace {

using base::concat;
using base::LogLevel;
using membership::Generation;
using membership::MemberStatus;
using std::chrono::milliseconds;

}  // namespace

// The ranks of one generation, and how they end.
struct RestartingAgent::Attempt {
  Attempt(const RunOptions& options, const WorkerGroupSpec& spec, AgentOutput& output,
          OrphanWatchdog& watchdog, std::uint64_t generation)
      : workers(options, spec, output.display(), watchdog),
        shutdown(workers, output, options.shutdown_timeout),
        generation(generation),
        world_size(spec.world_size) {}

  WorkerGroup workers;
  WorkerShutdown shutdown;
  const std::uint64_t generation;
  const int world_size;
  bool was_failure_told = false;
};

RestartingAgent::RestartingAgent(const RunOptions& options, MemberLink& member, StoreOffers& stores,
                                 const AgentParts& parts)
    : MemberAgent(options, member, parts), stores_(stores) {}

RestartingAgent::~RestartingAgent() = default;

bool RestartingAgent::is_over() const {
  if (attempt_) return false;
  return member_.is_over() || (leave_.has_begun() && (leave_.is_out() || leave_.must_kill()));
}

void RestartingAgent::wait() {
  const std::vector<int> wake{parts_.signals.fd(), member_.fd()};
  std::chrono::nanoseconds most = options_.monitor_interval;
  if (attempt_) {
    most = std::min<std::chrono::nanoseconds>(most, attempt_->shutdown.grace_left());
    return attempt_->workers.step(std::chrono::ceil<milliseconds>(most), wake);
  }
  std::vector<pollfd> waits;
  for (const int fd : wake) waits.push_back({fd, POLLIN, 0});
  output_.console().add_waits(waits);
  base::wait_for_files(waits, base::Deadline(most));
  output_.console().pump();
}

RankSet* RestartingAgent::ranks() {
  return attempt_ ? &attempt_->workers : nullptr;
}

void RestartingAgent::follow() {
  if (take_news()) {
    const auto& record = member_.view().record;
    if (record && stores_.note_generation(record->generation.number, record->generation.store)) {
      MemberStatus status = member_.status();
      status.store = stores_.address();
      member_.set_status(status);
    }
  }
  if (attempt_) supervise();
  report_failures();
  const bool may_start = !attempt_ && !member_.is_over() && !leave_.has_begun() &&
                         !member_.status().is_finished && member_.generation() > member_.status().entered;
  if (may_start) start();
}

void RestartingAgent::supervise() {
  WorkerShutdown& shutdown = attempt_->shutdown;
  if (leave_.has_begun() && leave_.is_out()) {
    shutdown.pass_on(leave_.signal());
  } else if (member_.is_over() || attempt_->generation != member_.generation()) {
    shutdown.stop();
  } else if (!attempt_->workers.failures().empty() && !shutdown.has_begun()) {
    announce_failure();
    shutdown.stop();
  }
  shutdown.kill_when_due(leave_.must_kill());
  if (!attempt_->workers.running()) end_attempt();
}

void RestartingAgent::start() {
  const membership::RendezvousRecord& record = *member_.view().record;
  const Generation& generation = record.generation;
  const membership::MemberInfo* const self = generation.find(member_.view().id);
  const HostPort store = split_endpoint(generation.store);
  WorkerGroupSpec spec;
  spec.attempt = record.restarts_used;
  spec.node_rank = static_cast<int>(self - generation.members.data());
  spec.num_nodes = static_cast<int>(generation.members.size());
  spec.first_rank = generation.first_process(self->id);
  spec.world_size = generation.num_processes();
  spec.master_addr = store.host;
  spec.master_port = store.port;
  spec.run_id = options_.run_id;
  spec.secret_fd = parts_.secret_fd;
  spec.log_folder = parts_.folder.attempt(num_attempts_++);
  output_.log(LogLevel::kInfo,
              concat("generation ", generation.number, ": node ", spec.node_rank, " of ", spec.num_nodes,
                     " starts rank ", spec.first_rank, " to ", spec.first_rank + options_.nproc_per_node - 1,
                     " of ", spec.world_size, "; ", generation.cause));
  attempt_ = std::make_unique<Attempt>(options_, spec, output_, parts_.watchdog, generation.number);
  MemberStatus status = member_.status();
  status.entered = generation.number;
  status.failure.clear();
  status.exit_status = 0;
  member_.set_status(status);
}

void RestartingAgent::announce_failure() {
  const RankFailure& failure = first_of(attempt_->workers.failures());
  MemberStatus status = member_.status();
  status.failure = summarize(failure);
  status.exit_status = failure.status;
  member_.set_status(status);
  attempt_->was_failure_told = true;
}

void RestartingAgent::end_attempt() {
  const WorkerGroup& workers = attempt_->workers;
  if (attempt_->was_failure_told) {
    failed_.failures = workers.failures();
    failed_world_size_ = attempt_->world_size;
  } else if (!workers.failures().empty()) {
    output_.log(LogLevel::kInfo, concat(summarize(first_of(workers.failures())), ", as generation ",
                                        attempt_->generation, " ended"));
  } else if (!attempt_->shutdown.has_begun()) {
    MemberStatus status = member_.status();
    status.is_finished = true;
    member_.set_status(status);
  }
  failed_.status = workers.status();
  attempt_.reset();
}

// Once it is known whether ranks start again.
void RestartingAgent::report_failures() {
  const auto& record = member_.view().record;
  if (failed_.failures.empty() || !record) return;
  const bool is_decided = record->generation.number != member_.status().entered || member_.is_over() ||
                          record->state == membership::RunState::kForming;
  if (!is_decided) return;
  failed_.restart = !member_.is_over();
  output_.report(failed_, failed_world_size_, record->restarts_used - 1, options_.max_restarts);
  failed_.failures.clear();
}

int RestartingAgent::finish() {
  if (leave_.has_begun()) {
    const int status = status_after_leave();
    output_.report({.restart = false, .status = status, .signal = leave_.signal(), .failures = {}}, 0, 0, 0);
    return status;
  }
  return status_of_end(member_, output_);
}

int RestartingAgent::status_after_leave() const {
  if (member_.status().is_finished) return 0;
  const bool had_ranks = num_attempts_ > 0 && !leave_.must_kill();
  return had_ranks ? failed_.status : 128 + leave_.signal();
}

}  // namespace cohort::launch
