#pragma once

#include <vector>

#include "cohort/launch/internal/agent_group.h"
#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/log_folder.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/internal/signal_queue.h"
#include "cohort/launch/internal/stop_request.h"
#include "cohort/launch/internal/worker_group.h"

namespace cohort::launch {

/// The objects of this process that an agent uses. All outlive it.
struct AgentParts {
  LogFolder& folder;
  OrphanWatchdog& watchdog;
  SignalQueue& signals;
  int secret_fd = -1;  ///< of the job's secret, for the ranks; -1: there is none
};

/// One node's side of a job: starts its ranks, passes signals on, ends them, starts them again. No LibTorch.
/// Not for users of the library.
///
/// It joins the parts: AgentGroup (how the agents agree), WorkerGroup (the ranks of this node), StopRequest
/// and WorkerShutdown (what ends them), AgentOutput (what is printed). WorkerGroup prints to AgentOutput, and
/// WorkerShutdown uses both. Threads: the caller of run(), which must outlive the ranks; no part but
/// AgentGroup has a thread.
class Agent {
 public:
  /// `spec` says where the ranks' rendezvous is and which they are, but for attempt and log folder.
  /// Ownership: refers to all.
  Agent(const RunOptions& options, const WorkerGroupSpec& spec, AgentGroup& agents, const AgentParts& parts);

  /// Returns the job's status. Throws: as run_job.
  int run();

 private:
  struct Attempt;

  AttemptReport run_attempt(int number);
  void supervise(Attempt& attempt);
  void handle_signals(Attempt* attempt);
  void handle_stop(Attempt* attempt, int number);
  void handle_other_nodes(Attempt& attempt);
  AttemptReport agree_on_result(const AttemptReport& own_report);
  void wait_for_agents();
  void wait_until_result_is_read();
  std::vector<int> wake_fds() const;

  const RunOptions& options_;
  const WorkerGroupSpec spec_;
  AgentGroup& agents_;
  const AgentParts parts_;
  AgentOutput output_;
  StopRequest stop_;
};

}  // namespace cohort::launch
