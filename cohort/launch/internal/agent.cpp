// An attempt starts the ranks and watches them. A failure, a signal, or word from another node ends them
// all. Then the agents agree on a result, which says whether all start their ranks again. Always: ranks are
// told once in an attempt to end, and get one time of grace. The loop waits neither for another agent nor
// for who reads the output, so a node whose store or terminal hangs still ends its ranks.
#include "cohort/launch/internal/agent.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/rank_signals.h"
#include "cohort/launch/internal/worker_shutdown.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kFlushTime = std::chrono::minutes(10);  // a reader such as less may take its time
constexpr auto kSeenTime = seconds(10);

// What came of the ranks of this node.
AttemptReport report_of(const WorkerGroup& workers, const StopRequest& stop) {
  AttemptReport report;
  report.signal = stop.number();
  report.status = stop.must_kill() ? 128 + stop.number() : workers.status();
  for (const RankFailure& failure : workers.failures()) {
    // A rank that ended by the job's signal did what it was told.
    if (stop.number() == 0 || failure.status != 128 + stop.number()) report.failures.push_back(failure);
  }
  return report;
}

}  // namespace

// The ranks of one attempt, and how they end.
struct Agent::Attempt {
  Attempt(const RunOptions& options, const WorkerGroupSpec& spec, AgentOutput& output,
          OrphanWatchdog& watchdog)
      : workers(options, spec, output.display(), watchdog),
        shutdown(workers, output, options.shutdown_timeout) {}

  WorkerGroup workers;
  WorkerShutdown shutdown;
};

Agent::Agent(const RunOptions& options, const WorkerGroupSpec& spec, AgentGroup& agents,
             const AgentParts& parts)
    : options_(options), spec_(spec), agents_(agents), parts_(parts) {}

int Agent::run() {
  if (parts_.folder.stays()) {
    output_.log(base::LogLevel::kInfo, concat("output of ranks is kept in ", parts_.folder.path().string()));
  }
  AttemptReport result;
  try {
    for (int number = 0;; ++number) {
      result = run_attempt(number);
      output_.report(result, spec_.world_size, number, options_.max_restarts);
      if (!result.restart) break;
    }
  } catch (const std::exception& error) {
    output_.flush(base::Deadline(seconds(1)));
    agents_.announce_abort(error.what());
    throw;
  }
  // Its reader may be slow, but a signal ends the wait.
  output_.flush(base::Deadline(kFlushTime), [&] {
    handle_signals(nullptr);
    return stop_.must_kill() || (stop_.number() != 0 && result.signal == 0);
  });
  return result.status;
}

AttemptReport Agent::run_attempt(int number) {
  WorkerGroupSpec spec = spec_;
  spec.secret_fd = parts_.secret_fd;
  spec.attempt = number;
  spec.log_folder = parts_.folder.attempt(number);
  agents_.begin_attempt(number);
  agents_.busy_until(base::Deadline(kStartTime));
  Attempt attempt(options_, spec, output_, parts_.watchdog);
  agents_.acknowledge();
  // It came between two attempts.
  if (stop_.number() != 0) attempt.shutdown.pass_on(stop_.number());
  supervise(attempt);
  return agree_on_result(report_of(attempt.workers, stop_));
}

std::vector<int> Agent::wake_fds() const {
  std::vector<int> fds{parts_.signals.fd()};
  if (agents_.fd() >= 0) fds.push_back(agents_.fd());
  return fds;
}

void Agent::supervise(Attempt& attempt) {
  while (attempt.workers.running()) {
    const auto wait =
        std::min<std::chrono::nanoseconds>(agents_.poll_interval(), attempt.shutdown.grace_left());
    attempt.workers.step(std::chrono::ceil<milliseconds>(wait), wake_fds());
    // Before failures are looked at: ranks that end by a signal to the job have not failed.
    handle_signals(&attempt);
    if (stop_.number() == 0 && !attempt.workers.failures().empty() && !attempt.shutdown.has_begun()) {
      agents_.announce_failure();
      attempt.shutdown.stop();
    }
    handle_other_nodes(attempt);
    attempt.shutdown.kill_when_due(stop_.must_kill());
  }
}

void Agent::handle_signals(Attempt* attempt) {
  while (const int number = parts_.signals.take()) {
    // All threads of the ranks are looked at, and there may be thousands.
    const bool takes_long = attempt != nullptr && (number == SIGUSR1 || number == SIGUSR2);
    if (takes_long) agents_.busy_until(base::Deadline(kStartTime));
    if (!pass_rank_signal(number, attempt == nullptr ? nullptr : &attempt->workers, output_)) {
      handle_stop(attempt, number);
    }
    if (takes_long) agents_.acknowledge();
  }
}

// The time for repeats begins last, as the ranks are told meanwhile, which may take long.
void Agent::handle_stop(Attempt* attempt, int number) {
  if (stop_.receive(number) == StopRequest::SignalType::kFirst) {
    agents_.announce_stop(number);
    if (attempt != nullptr) attempt->shutdown.pass_on(number);
  }
  stop_.begin_repeat_time();
}

// Another node's failure or signal is as our own; one that is lost ends everything.
void Agent::handle_other_nodes(Attempt& attempt) {
  agents_.acknowledge();
  if (stop_.adopt(agents_.stop_signal())) attempt.shutdown.pass_on(stop_.number());
  if (agents_.is_attempt_over()) attempt.shutdown.stop();
}

AttemptReport Agent::agree_on_result(const AttemptReport& own_report) {
  agents_.post_report(own_report);
  for (;;) {
    if (const auto result = agents_.result()) {
      if (!result->restart) wait_until_result_is_read();
      return *result;
    }
    wait_for_agents();
  }
}

// One wait for news from the other nodes, after the ranks of this one have ended.
void Agent::wait_for_agents() {
  std::vector<pollfd> waits;
  for (const int fd : wake_fds()) waits.push_back({fd, POLLIN, 0});
  output_.console().add_waits(waits);
  base::wait_for_files(waits, base::Deadline(agents_.poll_interval()));
  output_.console().pump();
  agents_.acknowledge();
  handle_signals(nullptr);
  stop_.adopt(agents_.stop_signal());
  if (stop_.must_kill()) {
    throw PeerError("launch.run", concat("two signals came while node ", options_.node_rank,
                                         " waited for the others, whose ranks may run still"));
  }
}

void Agent::wait_until_result_is_read() {
  const base::Deadline deadline{kSeenTime};
  while (!agents_.may_leave() && !deadline.expired() && !stop_.must_kill()) {
    pollfd file{agents_.fd(), POLLIN, 0};
    base::wait_for_files({&file, 1}, base::Deadline(milliseconds(20)).sooner(deadline));
    agents_.acknowledge();
    handle_signals(nullptr);
  }
}

}  // namespace cohort::launch
