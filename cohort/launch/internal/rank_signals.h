#pragma once

#include <signal.h>

#include <string>

#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/rank_set.h"

namespace cohort::launch {

/// Acts on a signal that does not ask to stop: SIGUSR1 and SIGUSR2 go to ranks that would not die of them;
/// SIGTSTP stops the ranks and this process until SIGCONT. `ranks` may be null. Returns false for any other
/// signal. Not for users of the library.
inline bool pass_rank_signal(int number, RankSet* ranks, AgentOutput& output) {
  if (number == SIGUSR1 || number == SIGUSR2) {
    const std::string withheld = ranks != nullptr ? ranks->notify(number) : "";
    if (!withheld.empty()) output.log(base::LogLevel::kWarning, withheld);
  } else if (number == SIGTSTP) {
    // Ranks have process groups of their own, which the terminal does not stop.
    if (ranks != nullptr) ranks->pause();
    ::raise(SIGSTOP);
    if (ranks != nullptr) ranks->resume();
  } else {
    return false;
  }
  return true;
}

}  // namespace cohort::launch
