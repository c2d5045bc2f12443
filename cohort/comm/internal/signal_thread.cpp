// A handler may do almost nothing, so it adds to an eventfd, and the thread reads it. Signals that come
// before the thread reads are one. stop() wakes the thread in the same way. Always: the eventfd outlives
// every handler that may still run, so it is one for the process, and never closed.
#include "cohort/comm/internal/signal_thread.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm {
namespace {

constexpr std::chrono::milliseconds kActTime(
    3000);  // how long stop() waits for a report that is being written

// A handler may still run on another thread when its owner ends.
int signal_event() {
  static const int fd = ::eventfd(0, EFD_CLOEXEC);
  return fd;
}
std::atomic<bool> is_signal_taken{false};

void wake_signal_thread() {
  const std::uint64_t increment = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(signal_event(), &increment, sizeof(increment));
}

// Only async-signal-safe calls in here.
void note_signal(int) {
  const int saved = errno;
  wake_signal_thread();
  errno = saved;
}

}  // namespace

void block_all_signals() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void SignalThread::start(std::function<void()> act) {
  if (number_ == 0) return;
  if (is_signal_taken.exchange(true)) {
    throw UsageError("comm.watch_for_desync", "another watch of this process has a signal already",
                     "signal 0 for this one");
  }
  struct sigaction action {};
  action.sa_handler = &note_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  if (signal_event() < 0 || ::sigaction(number_, &action, &before_) != 0) {
    is_signal_taken = false;
    throw UsageError("comm.watch_for_desync", base::concat("cannot handle signal ", number_));
  }
  thread_ = std::thread([self = shared_from_this(), act = std::move(act)] {
    self->act_on_signals(act);
    self->has_ended_ = true;
  });
}

void SignalThread::stop() {
  if (!thread_.joinable()) return;
  ::sigaction(number_, &before_, nullptr);
  is_stopping_ = true;
  wake_signal_thread();
  // It may be writing a report that nobody reads.
  if (base::poll_until([this] { return has_ended_.load(); }, base::Deadline(kActTime))) {
    thread_.join();
  } else {
    thread_.detach();
  }
  is_signal_taken = false;
}

void SignalThread::act_on_signals(const std::function<void()>& act) {
  block_all_signals();
  std::uint64_t count = 0;
  while (::read(signal_event(), &count, sizeof(count)) > 0 || errno == EINTR) {
    if (is_stopping_) return;
    act();
  }
}

}  // namespace cohort::comm
