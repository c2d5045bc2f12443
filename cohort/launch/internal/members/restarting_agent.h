#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cohort/launch/internal/members/member_agent.h"
#include "cohort/launch/internal/members/store_offers.h"

namespace cohort::launch {

/// One node of a run whose members may change, for a program that knows nothing of it: with each generation
/// all ranks are ended, and started again in the new world. No LibTorch. Not for users of the library.
///
/// Always: ranks run of one generation at a time, and only while this agent is a member of it, but for their
/// time to end. Threads: the caller of run(), which must outlive the ranks.
class RestartingAgent : public MemberAgent {
 public:
  /// `stores` serves the ranks' rendezvous. Ownership: refers to all. Throws: UsageError.
  RestartingAgent(const RunOptions& options, MemberLink& member, StoreOffers& stores,
                  const AgentParts& parts);
  ~RestartingAgent() override;

 private:
  struct Attempt;

  bool is_over() const override;
  void wait() override;
  RankSet* ranks() override;
  void follow() override;
  int finish() override;
  void supervise();
  void start();
  void announce_failure();
  void end_attempt();
  void report_failures();
  int status_after_leave() const;

  StoreOffers& stores_;
  std::unique_ptr<Attempt> attempt_;
  AttemptReport failed_;  // ranks whose failures are not printed yet
  int failed_world_size_ = 0;
  int num_attempts_ = 0;
};

}  // namespace cohort::launch
