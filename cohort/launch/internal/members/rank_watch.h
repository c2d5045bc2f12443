#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/launch/internal/members/observed_rank.h"

namespace cohort::launch {

/// Finds ranks of this node that do not enter a generation, and ranks that make no progress, by what they
/// say. A rank that waits for others is not the one that holds the run up. Reads no clock. Not for users of
/// the library.
class RankWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `enter`: how long a rank may take to enter a generation; one that has been in the run, `progress` where
  /// that is more. `progress`: how long its status may stay the same; 0: for ever. A line says so where ranks
  /// give each other up before.
  RankWatch(std::chrono::milliseconds enter, std::chrono::milliseconds progress)
      : enter_(enter), progress_(progress) {}

  /// Takes what the ranks of all places say. Returns lines for the log, mostly none.
  std::vector<std::string> note(const std::vector<ObservedRank>& ranks, Time now);
  /// Which rank does not enter generations, and how long it has not: until it says something, or has a
  /// successor. Else empty.
  std::string stuck() const;

 private:
  struct Place {
    membership::RankStatus status = {};
    int pid = 0;
    Time changed_at = {};    // the status, or that there is a generation to enter
    bool is_behind = false;  // it is to enter a generation
    bool is_told = false;    // the log says that it makes no progress
    std::string stuck = {};
  };
  std::string check_progress(std::size_t number, Place& place, const ObservedRank& seen, Time now) const;
  std::string check_times(const membership::RankStatus& status);

  const std::chrono::milliseconds enter_, progress_;
  std::vector<Place> places_;
  std::optional<Time> noted_at_;
  bool has_told_times_ = false;
};

}  // namespace cohort::launch
