#pragma once

#include <signal.h>

#include <utility>
#include <vector>

#include "cohort/launch/worker.h"

namespace cohort::launch {

/// While it lives, these signals of the process are collected here instead of doing what they do. A signal
/// that was ignored before stays so (nohup), unless it is among `always`. SIGPIPE is ignored. One at a time
/// in a process; signals that were handled before are again when it goes.
class SignalQueue {
 public:
  /// Throws: UsageError when another one lives.
  SignalQueue(const std::vector<int>& signals, const std::vector<int>& always);
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable when a signal has come.
  int fd() const { return pipe_.read.get(); }
  /// Returns the next signal that has come, or 0.
  int take();

 private:
  void install(int number, bool always);

  Pipe pipe_;
  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace cohort::launch
