#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/launch/internal/agent.h"
#include "cohort/launch/internal/members/linked_rank.h"
#include "cohort/launch/internal/members/observed_rank.h"
#include "cohort/launch/internal/rank_set.h"

namespace cohort::launch {

/// The ranks of one node in an elastic run: one in each place, and some in reserve, started, that wait for a
/// place. A rank that ends has a successor in its place.
///
/// Always: two processes of one place are in no generation together. A process is told of a generation only
/// if no process before it in its place was, and gets the place's region once that one has ended. Threads:
/// one caller, the thread that outlives the ranks. Not for users of the library.
class ElasticRanks : public RankSet {
 public:
  /// A rank that has ended, in its place.
  struct End {
    std::size_t place = 0;
    int status = 0;
    std::optional<RankFailure> failure;                   ///< nothing for status 0
    std::chrono::steady_clock::time_point alive_at = {};  ///< when it was known to live for the last time
    std::uint64_t committed_steps = 0;                    ///< by its last word
  };

  /// All ranks run, and none is in reserve. Ownership: refers to all. Throws: SystemError, and no rank is
  /// left.
  ElasticRanks(const RunOptions& options, const AgentParts& parts, Display& display);
  ~ElasticRanks() override;

  /// Waits until a rank prints, says something or ends, one of `wake` is readable, or the time is over. Then
  /// passes on what was printed. Returns the places whose ranks have ended.
  std::vector<End> step(std::chrono::milliseconds most, const std::vector<int>& wake);
  /// Fills a place whose rank has ended: by one in reserve, or by a new one.
  void replace(std::size_t place);
  /// Starts what is missing in reserve, with a lower priority until it takes a place.
  void fill_reserve();
  /// What all ranks are to know: `order` with the number of the first one of this node, or none where they
  /// wait.
  void publish(const membership::RankOrder& order);

  /// The run has succeeded: kills ranks that have not made the last step, as those in reserve. Their end is
  /// no failure.
  void drop_unfinished();

  /// Of the ranks in their places; an empty one where the rank has ended.
  std::vector<ObservedRank> observe() const;
  /// Kills the rank in a place; step() tells of its end.
  void end_place(std::size_t place);

  std::vector<int> running_ranks() const override;
  void signal(int number) override;
  std::string notify(int number) override;
  void pause() override;
  void resume() override;
  void stop() override;
  void kill() override;

 private:
  struct Place {
    std::unique_ptr<LinkedRank> rank;
    Fd region = Fd();         // memory in which its ranks leave their state; not open: there is none
    std::uint64_t told = 0;   // newest generation in which a process of this place has a number
    std::uint64_t first = 0;  // the first one that the process may enter
    bool is_dropped = false;
  };

  std::unique_ptr<LinkedRank> start(int local_rank, const Fd& region);
  void publish_to(std::size_t place);
  std::vector<LinkedRank*> all() const;

  const RunOptions& options_;
  const AgentParts parts_;
  Display& display_;
  std::vector<base::CpuSet> cores_;
  std::vector<Place> places_;
  std::vector<std::unique_ptr<LinkedRank>> reserve_;
  membership::RankOrder order_;
  std::size_t max_reserve_;
  int num_started_ = 0;
  std::chrono::steady_clock::time_point looked_at_ = std::chrono::steady_clock::now();  // who has ended
  bool is_ending_ = false;  // ranks are told to end: none is started any more
  std::set<int> withheld_;  // signals that the log has said were not passed on
};

}  // namespace cohort::launch
