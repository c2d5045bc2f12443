// The handler only sets lock-free flags, or ends the process; loops look at the flags. Always: the first
// signal wins by one exchange, and only a different signal, or the same after a time, ends the process.
// SIGPIPE gets a handler that does nothing, rather than being ignored, since programs that are started would
// inherit that.
#include "cohort/base/signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "cohort/base/error.h"

namespace cohort::base {
namespace {

std::atomic<bool> installed{false};
std::atomic<int> stop_requested{0};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free);

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
struct Before {
  struct sigaction action {};
  bool is_replaced = false;
};
std::array<Before, kSignals.size()> before{};

constexpr std::int64_t kSameSignalNs = std::chrono::nanoseconds(kSameSignalTime).count();
std::atomic<std::int64_t> first_request_ns{0};  // 0: none, or its handler has yet to write it
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Only async-signal-safe calls in here.
void handle(int signal) {
  if (signal == SIGPIPE) return;  // an error of the write; a handler, since programs inherit what is ignored
  if (signal == SIGUSR1) {
    save_requested.store(true);
    return;
  }
  int none = 0;
  if (stop_requested.compare_exchange_strong(none, signal)) {
    first_request_ns.store(now_ns());
    return;
  }
  const std::int64_t first = first_request_ns.load();
  if (signal != none || (first != 0 && now_ns() - first > kSameSignalNs)) _exit(128 + signal);
}

bool is_wanted(int signal, const struct sigaction& now) {
  if (signal == SIGHUP) return now.sa_handler != SIG_IGN;   // nohup asks to outlive the terminal
  if (signal == SIGPIPE) return now.sa_handler == SIG_DFL;  // or else the program knows what to do
  return true;
}

}  // namespace

TrainingSignals::TrainingSignals() {
  if (installed.exchange(true)) {
    throw UsageError("base.TrainingSignals", "another instance handles the signals of this process already",
                     "one training at a time with handle_signals");
  }
  stop_requested = 0;
  first_request_ns = 0;
  save_requested = false;
  struct sigaction action {};
  action.sa_handler = handle;
  // Calls that a signal interrupts continue: loops look at the flags, and no read need be repeated.
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before[i].action);
    before[i].is_replaced = is_wanted(kSignals[i], before[i].action);
    if (before[i].is_replaced) sigaction(kSignals[i], &action, nullptr);
  }
}

TrainingSignals::~TrainingSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    if (before[i].is_replaced) sigaction(kSignals[i], &before[i].action, nullptr);
  }
  installed = false;
}

int TrainingSignals::stop_signal() const {
  return stop_requested.load();
}

bool TrainingSignals::take_save_request() {
  return save_requested.exchange(false);
}

}  // namespace cohort::base
