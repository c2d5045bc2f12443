// A handler may do almost nothing, so it adds to an eventfd, and the thread reads it. Signals that come
// before the thread reads are one. That eventfd outlives every handler that may still run, so it is one for
// the process, and never closed. stop() wakes the thread through an eventfd of its own. Always: a thread that
// was left behind reads no signal of the next one, and start() drops signals that nobody has read.
#include "cohort/comm/internal/signal_thread.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm {
namespace {

// How long stop() waits for a report that is being written.
constexpr std::chrono::milliseconds kActTime(3000);

// A handler may still run on another thread when its owner ends.
int signal_event() {
  static const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd;
}
std::atomic<bool> is_signal_taken{false};

void wake_up(int event) {
  const std::uint64_t increment = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(event, &increment, sizeof(increment));
}

// Whether a signal has come since the last call.
bool take_signal() {
  std::uint64_t count = 0;
  return ::read(signal_event(), &count, sizeof(count)) > 0;
}

// Only async-signal-safe calls in here.
void note_signal(int) {
  const int saved = errno;
  wake_up(signal_event());
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
  stop_event_ = base::Fd(::eventfd(0, EFD_CLOEXEC));
  take_signal();  // one that came while an earlier thread ended
  struct sigaction action {};
  action.sa_handler = &note_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  if (!stop_event_.is_open() || signal_event() < 0 || ::sigaction(number_, &action, &before_) != 0) {
    is_signal_taken = false;
    throw UsageError("comm.watch_for_desync", base::concat("cannot handle signal ", number_));
  }
  try {
    thread_ = std::thread([self = shared_from_this(), act = std::move(act)] {
      self->act_on_signals(act);
      self->has_ended_ = true;
    });
  } catch (...) {
    ::sigaction(number_, &before_, nullptr);
    is_signal_taken = false;
    throw;
  }
}

void SignalThread::stop() {
  if (!thread_.joinable()) return;
  ::sigaction(number_, &before_, nullptr);
  is_stopping_ = true;
  wake_up(stop_event_.get());
  // It may be writing a report that nobody reads.
  if (base::poll_until([this] { return has_ended_.load(); }, base::Deadline(kActTime))) {
    thread_.join();
  } else {
    thread_.detach();
  }
  is_signal_taken = false;
}

// The wait has no deadline: stop() ends it.
void SignalThread::act_on_signals(const std::function<void()>& act) {
  block_all_signals();
  std::array<pollfd, 2> files{pollfd{signal_event(), POLLIN, 0}, pollfd{stop_event_.get(), POLLIN, 0}};
  while (!is_stopping_) {
    base::wait_for_files(files, base::Deadline::never());
    if (!is_stopping_ && take_signal()) act();
  }
}

}  // namespace cohort::comm
