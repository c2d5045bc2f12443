#pragma once

#include "cohort/base/threads/deadline.h"

namespace cohort::launch {

class SignalQueue;

/// The request to stop the job: the first signal that asks for it, here or on another node.
///
/// A batch system may send one request twice, and to each node. So a signal with the number of the request
/// repeats it (kRepeat), until base::kSameSignalTime after begin_repeat_time(). The same number later, or
/// another number, asks to kill (kSecond). Always: number() and must_kill() are set once, and never taken
/// back. Threads: one caller, the loop of the agent. Not for users of the library.
class StopRequest {
 public:
  enum class SignalType {
    kFirst,   ///< the request: tell the others and the ranks
    kRepeat,  ///< the request once more
    kSecond,  ///< from now on must_kill() holds
  };

  /// A signal that asks to stop has come to this process.
  SignalType receive(int number);
  /// The first signal of this process has been acted on, which may have taken long: the time in which it is
  /// the same request begins. Later calls change nothing.
  void begin_repeat_time();
  /// Another node has this request; 0: it has none. Returns whether it is the first one here.
  bool adopt(int number);

  /// The signal of the request; 0 as long as there is none.
  int number() const { return number_; }
  /// Whether ranks are to be killed at once.
  bool must_kill() const { return must_kill_; }

 private:
  int number_ = 0;
  bool must_kill_ = false;
  base::Deadline repeat_until_ = base::Deadline::never();  // never: no signal of this process was acted on
};

/// For waits without ranks: takes the signals that have come. SIGTSTP stops this process until SIGCONT.
/// SIGUSR1 and SIGUSR2 are for ranks, and do nothing. Returns whether a signal ends the wait: the first one
/// that asks to stop, or a second one.
bool take_stop_signal(SignalQueue& signals, StopRequest& stop);

}  // namespace cohort::launch
