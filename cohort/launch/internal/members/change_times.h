#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace cohort::launch {

/// How long the parts of a change of generation took, as one agent saw them. Reads no clock. Not for users of the library.
class ChangeTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// A rank of this node has ended, or has lost a link. The first counts.
  void note_cause(Time now);
  /// The agents have agreed on a generation with this node. Returns the line of the change before it, if it was not over.
  std::string note_generation(std::uint64_t number, std::string cause, Time now);
  /// What the ranks of this node have reached. Returns the line of the change once all have begun a step in the newest generation.
  std::string note_ranks(std::uint64_t entered, std::uint64_t recovered, Time now);

 private:
  std::string line(const char* end) const;

  std::uint64_t number_ = 0;  // of the change under way; 0: there is none
  std::string cause_;
  std::optional<Time> seen_at_;  // the cause of the next change
  std::optional<Time> caused_at_, agreed_at_, entered_at_, recovered_at_;
};

}  // namespace cohort::launch
