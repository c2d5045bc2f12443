#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cohort/launch/internal/agent.h"
#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/members/leave_request.h"
#include "cohort/launch/internal/members/member_link.h"
#include "cohort/launch/internal/members/store_offers.h"

namespace cohort::launch {

/// One node of a run whose members may change, for a program that knows nothing of it: with each generation all ranks are ended, and
/// started again in the new world. No LibTorch. Not for users of the library.
///
/// Always: ranks run of one generation at a time, and only while this agent is a member of it, but for their time to end. Threads: the
/// caller of run(), which must outlive the ranks.
class RestartingAgent {
 public:
  /// `stores` serves the ranks' rendezvous. Ownership: refers to all. Throws: UsageError.
  RestartingAgent(const RunOptions& options, MemberLink& member, StoreOffers& stores,
                  const AgentParts& parts);
  ~RestartingAgent();

  /// Returns the job's status. Throws: RendezvousError where the run fails, but not since a rank does; SystemError.
  int run();

 private:
  struct Attempt;

  bool is_over() const;
  void wait();
  void handle_signals();
  void follow();
  void supervise();
  void start();
  void announce_failure();
  void end_attempt();
  void report_failures();
  int finish();
  int status_after_leave() const;

  const RunOptions& options_;
  MemberLink& member_;
  StoreOffers& stores_;
  const AgentParts parts_;
  AgentOutput output_;
  LeaveRequest leave_;
  std::unique_ptr<Attempt> attempt_;
  AttemptReport failed_;  // ranks whose failures are not printed yet
  int failed_world_size_ = 0;
  int num_attempts_ = 0;
};

}  // namespace cohort::launch
