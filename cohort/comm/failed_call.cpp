// How a call ends that has failed. The group is marked as broken first, here and in the store, so that others
// learn of it. What continues in the backend is ended, since the tensors are the caller's again. Then this
// rank asks the store who has failed too: the ranks that have not are dead or stuck, and the error names
// them. Always: the first failure counts, and all that failed with it ends by one deadline (end_of_failure),
// however many calls there were. Surprising: the store may go with rank 0 meanwhile. The error says so, and
// whom the store had missed before.
#include "cohort/comm/failed_call.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/error_cause.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/missing_ranks.h"
#include "cohort/comm/store_adapter.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAskTime(100);    // for the store to say who they are
constexpr milliseconds kLeastTime(20);   // that a failure has
constexpr milliseconds kLookTime(100);   // between two questions who has failed too, of up to ...
constexpr int kRanksThatAskOften = 100;  // ranks

}  // namespace

void throw_translated(const std::exception& error, const std::string& where, const std::string& what) {
  const std::string message = base::concat(what, ": ", base::message_of(error));
  switch (cause_of(error)) {
    case ErrorCause::kUsage:
      throw UsageError(where, message);
    case ErrorCause::kTimeout:
      throw TimeoutError(where, message, "look at what the other ranks were doing, or raise the timeout");
    case ErrorCause::kPeer:
      throw PeerError(where, message, "look for the first rank that failed; this one only noticed");
    case ErrorCause::kOther:
      break;
  }
  throw CommError(where, message);
}

bool is_of_backend(const std::exception& error) {
  const ErrorCause cause = cause_of(error);
  return cause == ErrorCause::kTimeout || cause == ErrorCause::kPeer ||
         dynamic_cast<const CommError*>(&error) != nullptr ||
         dynamic_cast<const c10::DistError*>(&error) != nullptr;
}

base::Deadline end_of_failure(base::Deadline deadline) {
  constexpr milliseconds kDeath(1000);
  if (!deadline.expired()) return base::Deadline(kDeath).sooner(deadline.later(kLateTime));
  const base::Deadline::Clock::duration left = deadline.end() + kLateTime - base::Deadline::Clock::now();
  return base::Deadline(std::max<base::Deadline::Clock::duration>(left, kLeastTime));
}

// A collective of Gloo's has no end of its own, so the group's connections are closed. What it does then
// moves numbers within this process alone.
bool GroupState::end_calls(ErrorCause cause, Ends ends) const {
  try {
    const auto running = group->getBackend(c10::kCPU);
    auto* const connected = dynamic_cast<ClosesConnections*>(running.get());
    if (connected != nullptr) {
      const bool is_late = cause == ErrorCause::kTimeout;
      connected->close(is_late ? "another call on this rank timed out"
                               : "another call on this rank has lost a peer");
    } else if (ends == Ends::kAll) {
      running->abort();
    }
    return connected != nullptr;
  } catch (const std::exception&) {  // it cannot
    return false;
  }
}

void GroupState::fail(const std::exception& error, const std::string& what, base::Deadline until,
                      std::optional<base::Deadline> own_time) {
  mark_broken(what, error, until);
  // The ranks at the ends of a broken connection of Gloo's notice it. Other ranks notice it once these ranks
  // close their connections.
  const ErrorCause cause = cause_of(error);
  if (cause == ErrorCause::kTimeout || cause == ErrorCause::kPeer) end_calls(cause, Ends::kOfConnections);
  throw_if_ended();
  const auto hang_detector = registry->hang_detector();
  // Before the wait: other ranks wait for its table.
  if (hang_detector) hang_detector->failed(base::concat(what, ": ", base::message_of(error)));
  throw_if_ending(error);
  // Comparisons over the store say who is missing, and shm.
  const auto* const named = dynamic_cast<const NamesRanks*>(&error);
  const Silence silence = named == nullptr ? find_silent_ranks(until) : Silence{named->ranks(), ""};
  if (hang_detector) hang_detector->wait_for_table(until);
  if (cause == ErrorCause::kTimeout && own_time) give_up(silence.ranks, *own_time, what);
  throw_translated(error, "comm.group", what + silence.text);
}

void fail_call(const Group& group, const std::exception& error, const std::string& what,
               base::Deadline deadline, const std::function<bool()>& is_over) {
  GroupState& state = *group.shared_state();
  const base::Deadline until = state.end_of_failure(deadline);
  const std::string named =
      base::concat(what, " of group '", state.name, "' (rank ", state.rank, "/", state.size, ")");
  // First, as the store is asked until then, and the end of the call may take as long.
  if (!is_over()) state.mark_broken(named, error, until);
  if (state.end_calls(cause_of(error)) && !base::poll_until(is_over, until)) {
    base::log_warning(base::concat("[comm.group] ", named, " continues after its deadline"));
  }
  state.fail(error, named, until, deadline);
}

// Where none is under way nothing is aborted: another rank may still take what this one has sent.
void end_calls(const Group& group) {
  for (const auto& state : group.shared_state()->registry->groups()) {
    const bool is_idle = state->calls_under_way == 0 && !state->is_shared_with_c10d();
    if (!is_idle) state->end_calls(ErrorCause::kPeer);
  }
}

// Calls that were in flight with the first one that failed end with it.
base::Deadline GroupState::end_of_failure(base::Deadline deadline) const {
  const base::Deadline end = comm::end_of_failure(deadline);
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) return end;
  const base::Deadline least(kLeastTime);
  return end.sooner(failure_end_.end() < least.end() ? least : failure_end_);
}

void GroupState::mark_broken(const std::string& what, base::Deadline until, bool may_be_end) {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) return;
    broken_ = what;
    may_be_end_ = may_be_end;
    failure_end_ = until;
  }
  try {
    // Without the lock: the store may take until the deadline, and check_usable() must not wait for it.
    const StoreDeadline asks(until);
    StoreAdapter kv_store = store_adapter_of(*this);
    base::StoreBarrier(kv_store, "failed", rank, size).arrive();
  } catch (const std::exception&) {  // the store went with the rank that kept it
  }
}

// Many calls may be in flight when a peer dies, and fail one after the other: one of them asks. It asks more
// than once, since the rank that keeps the store may fail first, and takes the answer with it.
const GroupState::Silence& GroupState::find_silent_ranks(base::Deadline deadline) {
  if (size == 1) return silence_;
  std::call_once(silence_asked_, [&] {
    // One store answers all ranks, so each asks less often where there are many.
    const milliseconds pause(kLookTime * (1 + size / kRanksThatAskOften));
    std::vector<int> silent;
    const auto names = [&] { return base::concat("; ", base::format_list("rank", silent), " of ", size); };
    try {
      const StoreDeadline until(deadline.later(kAskTime));
      StoreAdapter kv_store = store_adapter_of(*this);
      base::StoreBarrier barrier(kv_store, "failed", rank, size);
      bool have_all = false;
      for (bool is_last = false; !have_all && !is_last;) {
        is_last = deadline.expired();
        silent = barrier.missing();
        have_all = silent.empty() || barrier.wait(deadline.sooner(base::Deadline(pause)));
      }
      if (!have_all) silence_ = {silent, names() + " did not notice: dead, or stuck"};
      // The rank that keeps the store stays until the others have their answer too.
      leave_key(*this, "failed", deadline);
    } catch (const std::exception& failure) {
      const bool is_gone = dynamic_cast<const TimeoutError*>(&failure) == nullptr;
      if (!silent.empty()) silence_.text = names() + " had not noticed when the store was asked last";
      silence_.text += base::concat("; the store cannot be reached (", base::message_of(failure), ")",
                                    is_gone ? ": the rank that keeps it is gone" : "");
    }
  });
  return silence_;
}

}  // namespace cohort::comm
