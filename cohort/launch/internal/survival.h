#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <vector>

/// Which processes live on when a signal comes, as far as /proc tells. No LibTorch.
namespace cohort::launch {

/// What one look at the threads of a process says of a signal.
enum class SignalFate {
  kEnds,     ///< a thread would take it as the kernel does by default; or there is no such process
  kHandled,  ///< the process handles or ignores it
  kAwaited,  ///< each thread has it blocked, or waits for it in sigwait(); one waits
  kBlocked,  ///< each thread has it blocked
};

SignalFate fate_of(pid_t process, int signal);

/// For each process, whether it handles or ignores the signal, or each of its threads has it blocked, as for
/// sigwait() and signalfd(), so that it does not die of it. False where /proc does not say.
/// Blocking: 0.1 s in all where processes have the signal blocked, and the time that the looks take: a
/// second, or that of four looks at each process where these take longer.
std::vector<bool> survives(const std::vector<pid_t>& processes, int signal);

/// The same for `count` processes: `look` takes one look at the process of that number, and `pause` passes
/// the time between two rounds of looks. Once it says that no time is left, four rounds are enough.
std::vector<bool> survives(std::size_t count, const std::function<SignalFate(std::size_t)>& fate_of,
                           const std::function<bool()>& pause);

}  // namespace cohort::launch
