#include "cohort/rpc/internal/agent/handler_threads.h"

#include <chrono>

namespace cohort::rpc {
namespace {

constexpr std::chrono::microseconds kQuick(50);  // a run that is as short as this
constexpr int kRunsBefore = 16;                  // so many in a row before one runs on the node's thread
constexpr int kRunsAfterLong = 100;              // after one that was longer, if only since it had no core

}  // namespace

void HandlerThreads::note_run(const std::string& function, base::Deadline::Clock::duration time) {
  const std::lock_guard lock(mutex_);
  int& runs = quick_runs_[function];
  if (time > kQuick) {
    runs = kRunsBefore - kRunsAfterLong;
  } else if (runs < kRunsBefore) {
    ++runs;
  }
}

bool HandlerThreads::is_quick(const std::string& function) const {
  const std::lock_guard lock(mutex_);
  const auto found = quick_runs_.find(function);
  return found != quick_runs_.end() && found->second >= kRunsBefore;
}

}  // namespace cohort::rpc
