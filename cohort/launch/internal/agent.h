#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/agent_store_client.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/log_folder.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/internal/output.h"
#include "cohort/launch/internal/signal_queue.h"
#include "cohort/launch/internal/worker_group.h"

namespace cohort::launch {

/// What an agent is given, all of which outlive it.
struct AgentParts {
  LogFolder& folder;
  OrphanWatchdog& watchdog;
  SignalQueue& signals;
  int secret_fd = -1;                        ///< of the job's secret, for the ranks; -1: there is none
  AgentStoreClient* store_client = nullptr;  ///< none with one node
};

/// One node's side of a job: starts its ranks, passes signals on, ends them, starts them again. What other
/// nodes do comes through `AgentStoreClient`. No LibTorch. Not for users of the library.
///
/// Keys on the store, A being the attempt and N the node: fail/A (some rank failed: end yours), end/A/N (what
/// came of mine), result/A (node 0: what comes of all), result_seen/A/N (I have read it: the store may go),
/// signal (someone asked to stop), abort (an agent gives up, and why).
class Agent {
 public:
  /// `place` says where the ranks' rendezvous is and which they are, but for attempt and log folder;
  /// `store_client` is nullptr with one node. Ownership: refers to all.
  Agent(const RunOptions& options, const WorkerGroupSpec& place, const AgentParts& parts);

  /// Returns the job's status. Throws: as run_job.
  int run();

 private:
  AttemptReport attempt(int number);
  void supervise(WorkerGroup& workers);
  void handle_signals(WorkerGroup* workers);
  void handle_stop(WorkerGroup* workers, int number);
  void notify(WorkerGroup& workers, int number);
  void handle_other_nodes(WorkerGroup& workers);
  void stop_by_signal(WorkerGroup* workers, int number);
  void stop_by_failure(WorkerGroup& workers);
  AttemptReport outcome_of(const WorkerGroup& workers) const;
  AttemptReport agree_on_result(AttemptReport own_report);
  AttemptReport exit_result_of(const std::vector<AttemptReport>& reports) const;
  std::string wait_for(const std::string& key);
  void wait_until_acknowledged();
  void log_line(base::LogLevel level, const std::string& text);
  void report_exit(const AttemptReport& exit_result);
  std::string key(const char* what) const;
  std::string key(const char* what, int node) const;
  std::chrono::milliseconds poll_interval() const;
  std::vector<int> wake_fds() const;

  const RunOptions& options_;
  WorkerGroupSpec place_;
  LogFolder& folder_;
  OrphanWatchdog& watchdog_;
  SignalQueue& signals_;
  AgentStoreClient* store_client_;
  Display display_;
  Console& console_ = display_.console;
  int signal_ = 0;                                       // the one that asked to stop
  bool force_kill_ = false;                              // a second one came
  bool was_signalled_ = false;                           // this process itself, to stop
  base::Deadline same_until_ = base::Deadline::never();  // until then it is one signal when it comes again
  bool ending_ = false;                                  // ranks of this attempt know that they are to end
  base::Deadline grace_ = base::Deadline::never();
};

}  // namespace cohort::launch
