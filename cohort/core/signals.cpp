#include "cohort/core/signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>

#include "cohort/core/error.h"

namespace cohort::core {
namespace {

std::atomic<bool> installed{false};
std::atomic<int> stop_requested{0};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free);

constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<struct sigaction, 3> previous{};

// Only async-signal-safe calls in here.
void handle(int signal) {
  if (signal == SIGUSR1) {
    save_requested.store(true);
  } else if (stop_requested.exchange(signal) != 0) {
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
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &previous[i]);
}

TrainingSignals::~TrainingSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous[i], nullptr);
  installed = false;
}

int TrainingSignals::stop_signal() const {
  return stop_requested.load();
}

bool TrainingSignals::take_save_request() {
  return save_requested.exchange(false);
}

}  // namespace cohort::core
