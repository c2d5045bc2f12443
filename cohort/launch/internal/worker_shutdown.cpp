#include "cohort/launch/internal/worker_shutdown.h"

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/base/text/format_list.h"

namespace cohort::launch {
namespace {

using base::concat;

}  // namespace

WorkerShutdown::WorkerShutdown(RankSet& workers, AgentOutput& output, std::chrono::milliseconds grace)
    : workers_(workers), output_(output), grace_time_(grace) {}

// The time counts from here: to tell thousands of ranks takes a part of it.
bool WorkerShutdown::begin() {
  if (has_begun_) return false;
  has_begun_ = true;
  grace_ = base::Deadline(grace_time_);
  return true;
}

void WorkerShutdown::pass_on(int signal) {
  if (!begin()) return;
  const std::size_t num_ranks = workers_.running_ranks().size();
  workers_.signal(signal);
  output_.log(base::LogLevel::kInfo,
              concat(base::describe_signal(signal), " is passed on to ", num_ranks,
                     num_ranks == 1 ? " rank; it has " : " ranks; they have ", grace_time_.count() / 1000,
                     " s, and a second signal kills ", num_ranks == 1 ? "it" : "them"));
}

void WorkerShutdown::stop() {
  if (begin()) workers_.stop();
}

void WorkerShutdown::kill_when_due(bool at_once) {
  if (!workers_.running()) return;
  const bool is_killed = !die_by_.is_never();
  if (!is_killed && (at_once || grace_.expired())) {
    const std::string late = base::join(workers_.running_ranks());
    workers_.kill();
    grace_ = base::Deadline::never();
    // A process that sleeps in the kernel (D in ps) does not die of SIGKILL: an error says so then.
    die_by_ = base::Deadline(std::chrono::seconds(30));
    if (!at_once) {
      output_.log(base::LogLevel::kWarning, concat("local rank ", late, " did not end within ",
                                                   grace_time_.count(), " ms, and is killed"));
    }
  }
  die_by_.check("launch.run",
                concat("local rank ", base::join(workers_.running_ranks()), " to die of SIGKILL"),
                "look what it waits for in the kernel: /proc/PID/wchan");
}

}  // namespace cohort::launch
