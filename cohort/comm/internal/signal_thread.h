#pragma once

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>

#include "cohort/base/files/fd.h"

/// A signal of the process that a thread acts on. Internal.
namespace cohort::comm {

/// Blocks all signals on the calling thread: they are for the threads of the program.
void block_all_signals();

/// Takes a signal of the process while it runs, and calls a function for it on a thread of its own.
///
/// Always: at most one in a process runs. The thread may be left behind, with what its function holds, so the
/// object is shared with it. Threads: start() and stop() by the owner; the function runs on the thread alone.
class SignalThread : public std::enable_shared_from_this<SignalThread> {
 public:
  /// `number`: 0 for none; then start() and stop() do nothing.
  explicit SignalThread(int number) : number_(number) {}

  int number() const { return number_; }
  /// From now on `act` is called for the signal; signals that come together are one.
  /// Throws: UsageError when another one runs, or the signal cannot be handled.
  void start(std::function<void()> act);
  /// The signal does again what it did before, and `act` is not called any more. Blocking: as long as `act`
  /// runs, 3 s at most; then the thread is left behind.
  void stop();

 private:
  void act_on_signals(const std::function<void()>& act);

  const int number_;
  struct sigaction before_ {};
  std::thread thread_;
  base::Fd stop_event_;  // stop() wakes the thread through it; signals have an eventfd of the process
  std::atomic<bool> is_stopping_{false}, has_ended_{false};
};

}  // namespace cohort::comm
