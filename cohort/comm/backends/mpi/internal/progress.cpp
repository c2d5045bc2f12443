// Calls of an OrderedQueue run in the order in which they came. A failed call stays at the front of its
// queue, so that none after it runs. MPI cannot continue after a late call: that fails at once, and the
// engine ends the job some seconds later. Always: no step blocks, so each call's deadline is seen in time.
#include "cohort/comm/backends/mpi/internal/progress.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

}  // namespace

void Progress::add(MpiWorkPtr call) {
  if (call->queue_ != nullptr) call->queue_->calls.push_back(call.get());
  running_.push_back(std::move(call));
}

bool Progress::has_collectives() const {
  return std::ranges::any_of(
      running_, [](const MpiWorkPtr& call) { return call->queue_ != nullptr && !call->isCompleted(); });
}

bool Progress::advance() {
  std::vector<MpiWorkPtr> over;
  for (MpiWorkPtr& call : running_) {
    if (call->isCompleted()) continue;  // it failed: its requests may be under way for ever
    OrderedQueue* const queue = call->queue_.get();
    if (queue != nullptr && queue->calls.front() != call.get()) continue;
    try {
      if (!call->advance()) continue;
    } catch (...) {
      failed_ = true;  // and stays at the front of its queue
      call->end(std::current_exception());
      continue;
    }
    if (queue != nullptr) queue->calls.pop_front();
    over.push_back(std::move(call));
  }
  if (over.empty()) return false;
  std::erase(running_, nullptr);
  for (const MpiWorkPtr& call : over) call->end(nullptr);
  return true;
}

void Progress::end_late_calls() {
  for (const MpiWorkPtr& call : running_) {
    if (!call->isCompleted() && call->is_late()) end_late(*call);
  }
}

void Progress::end_late(MpiWork& call) {
  const auto waited = std::chrono::duration_cast<milliseconds>(call.deadline_.elapsed()).count();
  const std::string what =
      base::concat(call.describe(), " timed out after ", waited, " ms: not all ranks have joined it");
  base::log_error(base::concat("[comm.mpi] ", what,
                               ". MPI cannot continue after that: the job ends by MPI_Abort within ",
                               kAbortGrace.count() / 1000, " s"));
  failed_ = true;
  // The first late call is named as the cause: what is late after it often waited for it.
  if (!abort_at_) {
    abort_at_ = base::Deadline(kAbortGrace);
    abort_reason_ = what;
  }
  call.end(std::make_exception_ptr(std::runtime_error(what)));
}

// The less moves, the longer the pause.
std::chrono::microseconds Progress::pause_time(bool has_moved) {
  using namespace std::chrono_literals;
  const auto now = base::Deadline::Clock::now();
  if (has_moved) last_moved_ = now;
  const auto quiet = now - last_moved_;
  if (running_.empty()) return 10ms;
  if (quiet < 2ms) return 0us;
  return quiet < 100ms ? 50us : std::chrono::microseconds(1ms);
}

}  // namespace cohort::comm::mpi
