#include "cohort/core/signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "cohort/core/error.h"

namespace cohort::core {
namespace {

std::atomic<bool> installed{false};
std::atomic<int> stop_requested{0};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free);

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGUSR1};
std::array<struct sigaction, 4> previous{};
struct sigaction previous_of_pipe {};

// A batch system and a launcher may both deliver what one person asked for once.
constexpr std::int64_t kSameRequestNs = 100'000'000;
std::atomic<std::int64_t> first_request_ns{0};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Only async-signal-safe calls in here.
void handle(int signal) {
  if (signal == SIGUSR1) {
    save_requested.store(true);
    return;
  }
  int none = 0;
  if (stop_requested.compare_exchange_strong(none, signal)) {
    first_request_ns.store(now_ns());
  } else if (signal != none || now_ns() - first_request_ns.load() > kSameRequestNs) {
    _exit(128 + signal);
  }
}

}  // namespace

TrainingSignals::TrainingSignals() {
  if (installed.exchange(true)) {
    throw UsageError("core.TrainingSignals", "another instance handles the signals of this process already",
                     "one training at a time with handle_signals");
  }
  stop_requested = 0;
  save_requested = false;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &previous[i]);
    // nohup asks to outlive the terminal.
    if (kSignals[i] == SIGHUP && previous[i].sa_handler == SIG_IGN) {
      sigaction(SIGHUP, &previous[i], nullptr);
    }
  }
  // The last lines printed must not end a process that has yet to save.
  sigaction(SIGPIPE, nullptr, &previous_of_pipe);
  action.sa_handler = SIG_IGN;
  if (previous_of_pipe.sa_handler == SIG_DFL) sigaction(SIGPIPE, &action, nullptr);
}

TrainingSignals::~TrainingSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous[i], nullptr);
  sigaction(SIGPIPE, &previous_of_pipe, nullptr);
  installed = false;
}

int TrainingSignals::stop_signal() const {
  return stop_requested.load();
}

bool TrainingSignals::take_save_request() {
  return save_requested.exchange(false);
}

}  // namespace cohort::core
