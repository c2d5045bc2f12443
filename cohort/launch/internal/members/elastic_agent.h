#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/launch/internal/members/change_times.h"
#include "cohort/launch/internal/members/elastic_ranks.h"
#include "cohort/launch/internal/members/hung_ranks.h"
#include "cohort/launch/internal/members/member_agent.h"
#include "cohort/launch/internal/members/place_failures.h"
#include "cohort/launch/internal/members/rank_fold.h"
#include "cohort/launch/internal/members/rank_watch.h"
#include "cohort/launch/internal/worker_shutdown.h"

namespace cohort::launch {

/// One node of an elastic run: tells its ranks of each generation, and the other agents what its ranks say.
/// Ranks that live on are not started again. No LibTorch. Not for users of the library. Threads: the caller
/// of run(), which must outlive the ranks.
class ElasticAgent : public MemberAgent {
 public:
  /// Starts the ranks. Ownership: refers to all. Throws: UsageError, SystemError.
  ElasticAgent(const RunOptions& options, MemberLink& member, const AgentParts& parts);

 private:
  // How this node's part ends.
  struct Ending {
    int status = 0;  // the first of ranks that is not 0
    base::Deadline stop_by =
        base::Deadline::never();  // when ranks are told that have not ended by themselves
    int num_lost = 0;             // ranks that have ended while this node was no member
    bool has_given_up = false;
    bool may_save = true;  // what follows has not come
    base::Deadline save_by =
        base::Deadline::never();    // when ranks that save are told that the run has failed
    std::uint64_t generation = 0;   // that ranks were told of last
    bool is_leaving = false;        // ranks know it
    std::uint64_t state_bytes = 0;  // that ranks have given and got
  };

  bool is_over() const override;
  bool is_leaving() const { return leave_.has_begun() && !leave_.ends_run(); }
  // Where the run ends with this node, a rank that has no place any more has nothing to wait for either.
  bool do_ranks_leave() const {
    if (end_.has_given_up || !leave_.has_begun()) return end_.has_given_up;
    return leave_.ends_run() ? member_.generation() == 0 : !leave_.keeps_state();
  }
  void wait() override;
  RankSet* ranks() override { return &ranks_; }
  void follow() override;
  int finish() override;
  void note_end(const ElasticRanks::End& end);
  void note_failure(const RankFailure& failure, std::size_t place, std::uint64_t committed_steps);
  void give_up(int status);
  void publish_order();
  void report_ranks(const std::vector<ObservedRank>& ranks);
  void end_hung_rank(const std::vector<ObservedRank>& ranks);
  void start_successors();
  void end_ranks();
  bool have_left() const;
  bool may_save();
  void report_leaving();
  void announce_leave();
  void log_change(const std::string& line);

  ElasticRanks ranks_;
  WorkerShutdown shutdown_;
  HungRanks hung_;
  base::Deadline ask_by_ = base::Deadline::never();  // when ranks that are late get an order again
  PlaceFailures failures_;
  ChangeTimes times_;
  RankWatch watch_;
  std::optional<RankLoss> loss_;
  Ending end_;
};

}  // namespace cohort::launch
