#include "cohort/launch/internal/signal_queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

std::atomic<int> write_end{-1};

// Only async-signal-safe calls in here.
void collect(int number) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const ssize_t count = ::write(write_end.load(), &byte, 1);
  errno = error;
}

}  // namespace

SignalQueue::SignalQueue(const std::vector<int>& signals, const std::vector<int>& always)
    : pipe_(make_pipe()) {
  // A handler must not wait: a signal that finds the pipe full is lost.
  ::fcntl(pipe_.write.get(), F_SETFL, O_NONBLOCK);
  int none = -1;
  if (!write_end.compare_exchange_strong(none, pipe_.write.get())) {
    throw UsageError("launch.run", "another job is run by this process", "one after the other");
  }
  for (const int number : signals) install(number, false);
  for (const int number : always) install(number, true);
  struct sigaction ignore {
  }, before{};
  // A console that nobody reads is an error of write(), and must not end the agent.
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &before);
  before_.emplace_back(SIGPIPE, before);
}

void SignalQueue::install(int number, bool always) {
  struct sigaction action {
  }, before{};
  if (::sigaction(number, nullptr, &before) != 0) return;
  // nohup ignores SIGHUP on purpose.
  if (before.sa_handler == SIG_IGN && !always) return;
  action.sa_handler = collect;
  action.sa_flags = SA_RESTART;
  ::sigfillset(&action.sa_mask);  // else of two that wait the later handler runs first
  if (::sigaction(number, &action, nullptr) == 0) before_.emplace_back(number, before);
}

SignalQueue::~SignalQueue() {
  for (auto at = before_.rbegin(); at != before_.rend(); ++at) ::sigaction(at->first, &at->second, nullptr);
  write_end = -1;
}

int SignalQueue::take() {
  unsigned char number = 0;
  return ::read(pipe_.read.get(), &number, 1) == 1 ? number : 0;
}

}  // namespace cohort::launch
