#pragma once

#include "cohort/launch/internal/agent.h"
#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/members/leave_request.h"
#include "cohort/launch/internal/members/member_link.h"
#include "cohort/launch/internal/rank_set.h"

namespace cohort::launch {

/// One node of a run whose members may change: the loop, and what it works with. No LibTorch. Not for users
/// of the library. Threads: the caller of run(), which must outlive the ranks.
class MemberAgent {
 public:
  virtual ~MemberAgent() = default;
  MemberAgent(const MemberAgent&) = delete;
  MemberAgent& operator=(const MemberAgent&) = delete;

  /// Returns the job's status. Throws: RendezvousError where the run fails, but not since a rank does;
  /// SystemError.
  int run();

 protected:
  /// Ownership: refers to all.
  MemberAgent(const RunOptions& options, MemberLink& member, const AgentParts& parts);

  /// Nothing of this node runs any more, and nothing will.
  virtual bool is_over() const = 0;
  /// Waits for the ranks, for signals and for news of the rendezvous.
  virtual void wait() = 0;
  /// The ranks that run; null: none do.
  virtual RankSet* ranks() = 0;
  /// Does what follows from what is known.
  virtual void follow() = 0;
  /// Returns the job's status, at the end.
  virtual int finish() = 0;

  /// Takes news of the rendezvous, and says what this node waits for. Returns whether there were any.
  bool take_news();

  const RunOptions& options_;
  MemberLink& member_;
  const AgentParts parts_;
  AgentOutput output_;
  LeaveRequest leave_;

 private:
  void handle_signals();
};

}  // namespace cohort::launch
