#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace cohort::launch {

/// How long the parts of a change of generation took, as one agent saw them: one line for each change. Reads
/// no clock. Not for users of the library.
///
/// | part | from | to |
/// | --- | --- | --- |
/// | detect | the last time that who is gone was known to live | the first notice of it; so at most |
/// | agree | the first notice on this node | this node knows the next generation |
/// | rebuild | that | all ranks of this node have their links, and the state |
/// | redo | that | all ranks of this node have committed a step |
class ChangeTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// A rank of this node has ended, or has lost a link. The first counts. `alive_at`: when it was known to
  /// live, if it is known.
  void note_cause(Time now, std::optional<Time> alive_at);
  /// The agents have agreed on a generation with this node. `detect_ms`: Generation::detect_ms. Returns the
  /// line of the change before it, if it was not over: with how long it has taken so far.
  std::string note_generation(std::uint64_t number, std::string cause, std::uint64_t detect_ms, Time now);
  /// Generations in which all ranks of this node have had the state, and have committed a step. Returns the
  /// line of the change once both are the newest.
  std::string note_ranks(std::uint64_t recovered, std::uint64_t stepped, Time now);
  /// No step follows any more. Returns the line of the change that was not over.
  std::string finish();

 private:
  struct Cause {
    Time seen_at;
    std::optional<Time> alive_at;
  };
  // `ended_at`: when another generation came first; nothing: the change is over.
  std::string line(const std::optional<Time>& ended_at) const;

  std::uint64_t number_ = 0;  // of the change under way; 0: there is none
  std::string text_;
  std::optional<Cause> next_;   // of the next change
  std::optional<Cause> cause_;  // of the one under way
  std::chrono::milliseconds detect_{0};
  Time agreed_at_;
  std::optional<Time> recovered_at_, stepped_at_;
};

}  // namespace cohort::launch
