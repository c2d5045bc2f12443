#pragma once

#include <functional>
#include <string>

#include "cohort/base/log.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/output.h"

namespace cohort::launch {

/// What an agent prints: the lines of its ranks, its own log, and the report of an attempt.
///
/// Always: no call but flush() waits for who reads stdout or stderr, so a terminal that hangs holds up no
/// end of ranks. Threads: one caller, the loop of the agent. Not for users of the library.
class AgentOutput {
 public:
  /// Where the lines of ranks go.
  Display& display() { return display_; }
  /// What the agent's loop waits for, and pumps.
  Console& console() { return display_.console; }

  /// Writes a line of the log, after what waits in the console where stderr does not take it at once.
  void log(base::LogLevel level, const std::string& text);
  /// Logs what came of an attempt: its failures, whether ranks are started again, and the signal that ended
  /// it.
  void report(const AttemptReport& result, int world_size, int attempt, int max_restarts);
  /// Writes all that waits; gives up at the deadline, or when `stop` says so.
  void flush(base::Deadline deadline, const std::function<bool()>& stop = {}) {
    display_.console.flush(deadline, stop);
  }

 private:
  Display display_;
};

}  // namespace cohort::launch
