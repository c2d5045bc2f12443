#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/launch/internal/members/observed_rank.h"

namespace cohort::launch {

/// Finds ranks of this node for which others wait in vain, so that they must be replaced: one that does not
/// answer its agent, and one of two that cannot keep a link between them. Reads no clock. Not for users of
/// the library.
class HungRanks {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Found {
    std::size_t place = 0;
    std::string why;
    bool is_traced = false;  ///< it is under a debugger, and is not to be replaced
  };

  /// `silence`: RendezvousOptions::silence. `is_traced`: whether another process, as a debugger, holds this
  /// one.
  explicit HungRanks(std::chrono::milliseconds silence,
                     std::function<bool(int pid)> is_traced = is_process_traced)
      : silence_(silence), is_traced_(std::move(is_traced)) {}

  /// By what Linux says of it.
  static bool is_process_traced(int pid);

  /// To be called several times a second. `generation`: number of the newest one, of which `self` is a
  /// member. A process is found once; one that was under a debugger, and still does not answer without, once
  /// more.
  std::optional<Found> find_hung(std::uint64_t generation, membership::MemberId self,
                                 const std::vector<ObservedRank>& ranks, Time now);
  /// A place whose rank has said nothing for 30 s; once.
  std::optional<std::size_t> find_mute(const std::vector<ObservedRank>& ranks, Time now);

 private:
  std::optional<Found> find_unanswering(const std::vector<ObservedRank>& ranks, Time now);
  std::optional<Found> find_end_of_link(std::uint64_t generation, membership::MemberId self,
                                        const std::vector<ObservedRank>& ranks, Time now);

  struct Unanswered {
    int pid = 0;
    std::uint64_t told = 0;  // the first order that the rank has not answered
    Time since;
  };
  struct Mute {
    int pid = 0;
    Time since;
  };
  struct Loss {
    std::uint64_t generation = 0, steps = 0;
    Time since;
  };

  std::optional<Found> note_found(std::optional<Found> found, const std::vector<ObservedRank>& ranks);

  const std::chrono::milliseconds silence_;
  const std::function<bool(int)> is_traced_;
  std::map<std::size_t, int> found_, found_traced_;  // process ids by place
  std::optional<Time> looked_at_;
  std::map<std::size_t, Unanswered> unanswered_;  // by place
  std::map<std::size_t, Mute> mute_;              // by place
  std::optional<Loss> loss_;                      // the first since a step was made
  std::optional<Loss> repeated_;
  bool has_found_mute_ = false;
};

}  // namespace cohort::launch
