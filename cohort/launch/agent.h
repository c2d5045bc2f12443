#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cohort/core/deadline.h"
#include "cohort/core/log.h"
#include "cohort/launch/failure.h"
#include "cohort/launch/guard.h"
#include "cohort/launch/log_folder.h"
#include "cohort/launch/output.h"
#include "cohort/launch/peers.h"
#include "cohort/launch/signal_inbox.h"
#include "cohort/launch/team.h"

namespace cohort::launch {

/// What an agent is given, all of which outlive it.
struct AgentParts {
  LogFolder& folder;
  Guard& guard;
  SignalInbox& signals;
  int secret_fd = -1;      ///< of the job's secret, for the ranks; -1: there is none
  Peers* peers = nullptr;  ///< none with one node
};

/// One node's side of a job: starts its ranks, passes signals on, ends them, starts them again. What other
/// nodes do comes through `Peers`. No LibTorch. Not for users of the library.
///
/// Keys on the board, A being the attempt and N the node: fail/A (some rank failed: end yours), end/A/N (what
/// came of mine), verdict/A (node 0: what comes of all), seen/A/N (I have read it: the store may go), signal
/// (someone asked to stop), abort (an agent gives up, and why).
class Agent {
 public:
  /// `place` says where ranks meet and which they are, but for attempt and log folder; `peers` is nullptr
  /// with one node. Ownership: refers to all.
  Agent(const RunOptions& options, const TeamPlace& place, const AgentParts& parts);

  /// Returns the job's status. Throws: as run_job.
  int run();

 private:
  AttemptReport attempt(int number);
  void supervise(Team& team);
  void heed_signals(Team* team);
  void heed_stop(Team* team, int number);
  void notify(Team& team, int number);
  void heed_peers(Team& team);
  void stop_by_signal(Team* team, int number);
  void stop_by_failure(Team& team);
  AttemptReport outcome_of(const Team& team) const;
  AttemptReport agree(AttemptReport mine);
  AttemptReport verdict_on(const std::vector<AttemptReport>& reports) const;
  std::string wait_for(const std::string& key);
  void wait_until_seen();
  void say(core::LogLevel level, const std::string& text);
  void tell(const AttemptReport& verdict);
  std::string key(const char* what) const;
  std::string key(const char* what, int node) const;
  std::chrono::milliseconds look_time() const;
  std::vector<int> wake_fds() const;

  const RunOptions& options_;
  TeamPlace place_;
  LogFolder& folder_;
  Guard& guard_;
  SignalInbox& signals_;
  Peers* peers_;
  Display display_;
  Console& console_ = display_.console;
  int signal_ = 0;                                       // the one that asked to stop
  bool hurry_ = false;                                   // a second one came
  bool was_signalled_ = false;                           // this process itself, to stop
  core::Deadline same_until_ = core::Deadline::never();  // until then it is one signal when it comes again
  bool ending_ = false;                                  // ranks of this attempt know that they are to end
  core::Deadline grace_ = core::Deadline::never();
};

}  // namespace cohort::launch
