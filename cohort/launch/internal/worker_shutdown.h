#pragma once

#include <chrono>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/rank_set.h"

namespace cohort::launch {

/// How the ranks of one attempt are ended: they are told once, have one time of grace, and are killed.
///
/// Always: the first of pass_on() and stop() tells the ranks, and starts the time of grace; later calls of
/// either do nothing. Ranks are killed once. Threads: one caller, the loop of the agent. Not for users of the
/// library.
class WorkerShutdown {
 public:
  /// `grace`: from the first word to SIGKILL. Ownership: refers to the group and the output.
  WorkerShutdown(RankSet& workers, AgentOutput& output, std::chrono::milliseconds grace);

  /// Whether the ranks have been told to end.
  bool has_begun() const { return has_begun_; }
  /// The job is asked to stop by this signal: each rank gets it.
  void pass_on(int signal);
  /// The job has failed: SIGTERM for each rank.
  void stop();
  /// Time left until the ranks are killed; the largest duration where nothing is to be done then.
  base::Deadline::Clock::duration grace_left() const { return grace_.remaining(); }
  /// Kills ranks that run after the time of grace, or at once.
  /// Throws: TimeoutError where a rank has outlived SIGKILL by 30 s.
  void kill_when_due(bool at_once);

 private:
  bool begin();

  RankSet& workers_;
  AgentOutput& output_;
  const std::chrono::milliseconds grace_time_;
  bool has_begun_ = false;
  base::Deadline grace_ = base::Deadline::never();   // never: before it has begun, and after the kill
  base::Deadline die_by_ = base::Deadline::never();  // never: before the kill
};

}  // namespace cohort::launch
