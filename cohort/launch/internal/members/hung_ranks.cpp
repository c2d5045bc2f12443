// A rank answers each order by a thread of its own, however long it computes. One that does not is stopped,
// or its process hangs: the others are in the next generation, and wait for its address there. Until a rank
// has entered that generation its agent sends it an order in each `silence`. The time is that after which a
// node which leaves no longer waits for others either. A debugger stops a rank too. Whoever uses one wants
// the rank, and the others wait: until it continues, or their agents do without its node (RankWatch). A rank
// that is killed under a debugger does not end for its agent before the debugger lets it go.
//
// A link between two ranks of this node that is lost is made again with the next generation. If one is lost
// again before a step was made, one of the two ends: the one that has not entered the generation, else the
// later one. It ends after another `silence`, as the other side may have died, which the agent sees by
// itself. A rank names the node to which it has lost a link, and not the rank. So where a node has more than
// two ranks only one that has lost a link is surely an end of it.
#include "cohort/launch/internal/members/hung_ranks.h"

#include <algorithm>
#include <fstream>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

constexpr int kSilencesToAnswer = 10;
constexpr std::chrono::milliseconds kLeastTimeToAnswer(
    2'000);                                           // a busy host's threads stand still for a while
constexpr auto kMuteTime = std::chrono::seconds(30);  // few programs take longer to begin

}  // namespace

std::optional<HungRanks::Found> HungRanks::find_hung(std::uint64_t generation, membership::MemberId self,
                                                     const std::vector<ObservedRank>& ranks, Time now) {
  // An agent that was stopped itself gives its ranks all of the time again.
  if (looked_at_ && now - *looked_at_ > kLongestPause) {
    unanswered_.clear();
    repeated_.reset();
  }
  looked_at_ = now;
  if (auto found = note_found(find_unanswering(ranks, now), ranks)) return found;
  return note_found(find_end_of_link(generation, self, ranks, now), ranks);
}

std::optional<HungRanks::Found> HungRanks::note_found(std::optional<Found> found,
                                                      const std::vector<ObservedRank>& ranks) {
  if (!found) return std::nullopt;
  const int pid = ranks[found->place].pid;
  found->is_traced = is_traced_(pid);
  int& before = (found->is_traced ? found_traced_ : found_)[found->place];
  return std::exchange(before, pid) == pid ? std::nullopt : std::move(found);
}

bool HungRanks::is_process_traced(int pid) {
  std::ifstream status(base::concat("/proc/", pid, "/status"));
  for (std::string word; status >> word;) {
    if (word == "TracerPid:") return status >> word && word != "0";
  }
  return false;
}

std::optional<std::size_t> HungRanks::find_mute(const std::vector<ObservedRank>& ranks, Time now) {
  for (std::size_t place = 0; place < ranks.size() && !has_found_mute_; ++place) {
    const ObservedRank& rank = ranks[place];
    if (rank.pid == 0 || rank.status != membership::RankStatus()) {
      mute_.erase(place);
      continue;
    }
    Mute& mute = mute_[place];
    if (mute.pid != rank.pid) mute = {rank.pid, now};  // a successor has the whole time
    if (now - mute.since <= kMuteTime) continue;
    has_found_mute_ = true;
    return place;
  }
  return std::nullopt;
}

std::optional<HungRanks::Found> HungRanks::find_unanswering(const std::vector<ObservedRank>& ranks,
                                                            Time now) {
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    const ObservedRank& rank = ranks[place];
    // Nobody waits for one that has no generation to enter. One that is in the newest one may compute. If it
    // is stopped there, the others lose their links to it, and there is another generation to enter.
    if (rank.pid == 0 || !rank.is_behind() || rank.status.heard == 0 || rank.status.heard >= rank.told) {
      unanswered_.erase(place);
      continue;
    }
    Unanswered& unanswered = unanswered_[place];
    if (unanswered.pid != rank.pid || unanswered.told <= rank.status.heard) {
      unanswered = {rank.pid, rank.told, now};
    }
    const auto most = std::max(kLeastTimeToAnswer, kSilencesToAnswer * silence_);
    if (now - unanswered.since <= most) continue;
    unanswered_.erase(place);
    return Found{place, base::concat("it has not answered its agent for ", most.count(),
                                     " ms, and others wait for it")};
  }
  return std::nullopt;
}

std::optional<HungRanks::Found> HungRanks::find_end_of_link(std::uint64_t generation,
                                                            membership::MemberId self,
                                                            const std::vector<ObservedRank>& ranks,
                                                            Time now) {
  std::uint64_t steps = 0;
  std::optional<std::size_t> last_loser, absent;
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    const ObservedRank& rank = ranks[place];
    steps = std::max(steps, rank.status.committed_steps);
    if (rank.pid == 0) return std::nullopt;  // it has died, which is why links are lost
    if (rank.status.entered != generation) {
      absent = place;
    } else if (std::ranges::count(rank.status.lost_links, self) > 0) {
      last_loser = place;
    }
  }
  if (generation == 0 || !last_loser) {
    repeated_.reset();
    return std::nullopt;
  }
  if (!loss_ || loss_->steps < steps) loss_ = Loss{generation, steps, now};
  if (loss_->generation == generation) return std::nullopt;
  if (!repeated_ || repeated_->generation != generation) repeated_ = Loss{generation, steps, now};
  if (now - repeated_->since <= silence_) return std::nullopt;
  repeated_.reset();
  loss_.reset();
  return Found{
      ranks.size() == 2 ? absent.value_or(*last_loser) : *last_loser,
      base::concat("ranks of this node have lost a link between them in two generations, and made no "
                   "step in generation ",
                   generation)};
}

}  // namespace cohort::launch
