#pragma once

#include <signal.h>

#include <ctime>

namespace cohort::comm {

/// While it lives, writing to a pipe or connection that nobody reads any more is an error (EPIPE) on this
/// thread, and for ever on threads that it makes meanwhile; by itself it would end the process without a word
/// (SIGPIPE). For code that writes without MSG_NOSIGNAL: Gloo's.
class BlockedPipeSignal {
 public:
  BlockedPipeSignal() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~BlockedPipeSignal() {
    if (::sigismember(&before_, SIGPIPE) == 1) return;
    const timespec at_once{};
    while (::sigtimedwait(&set_, nullptr, &at_once) == SIGPIPE) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedPipeSignal(const BlockedPipeSignal&) = delete;
  BlockedPipeSignal& operator=(const BlockedPipeSignal&) = delete;

 private:
  sigset_t set_, before_;
};

}  // namespace cohort::comm
