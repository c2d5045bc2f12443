#include "cohort/launch/internal/members/rank_fold.h"

#include <algorithm>
#include <set>

namespace cohort::launch {

membership::MemberStatus fold_ranks(const membership::MemberStatus& before,
                                    const std::vector<membership::RankStatus>& ranks,
                                    const std::optional<RankLoss>& loss) {
  using membership::RankStatus;
  membership::MemberStatus status = before;
  const auto least = [&](std::uint64_t RankStatus::*number) {
    return (*std::ranges::min_element(ranks, {}, number)).*number;
  };
  const auto all = [&](bool RankStatus::*flag) {
    return std::ranges::all_of(ranks, [&](const RankStatus& rank) { return rank.*flag; });
  };
  status.is_ready = all(&RankStatus::is_ready);
  status.is_finished = all(&RankStatus::is_finished);
  status.entered = least(&RankStatus::entered);
  status.recovered = least(&RankStatus::recovered);
  status.failure.clear();
  status.exit_status = 0;
  status.ends_run = false;
  if (loss) {
    status.ends_run = loss->ends_run;
    status.entered = loss->generation;
    status.failure = loss->text;
    status.exit_status = loss->exit_status;
  }
  status.stop_signal = std::ranges::max_element(ranks, {}, &RankStatus::stop_signal)->stop_signal;
  status.is_state_lost = false;
  std::set<membership::MemberId> lost_links;
  for (const RankStatus& rank : ranks) {
    status.committed_steps = std::max(status.committed_steps, rank.committed_steps);
    // What is said of an earlier generation is no news of this one.
    if (rank.entered != status.entered) continue;
    lost_links.insert(rank.lost_links.begin(), rank.lost_links.end());
    status.is_state_lost = status.is_state_lost || rank.is_state_lost;
  }
  status.lost_links.assign(lost_links.begin(), lost_links.end());
  return status;
}

}  // namespace cohort::launch
