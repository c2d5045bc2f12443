#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::comm {

struct GroupState;

/// What a group belongs to, and ends with: the generation of an elastic run. Once it has ended, calls of the
/// group and of its subgroups throw its error, and not what the backend says. It has calls that are under way
/// then ended by end_calls() (failed_call.h). Threads: any.
class GroupOwner {
 public:
  virtual ~GroupOwner() = default;
  /// What calls of the group throw; null: it has not ended. Does not wait.
  virtual std::exception_ptr end() const = 0;
  /// The same for a call that has lost a peer: it may notice before the owner does. A group calls it once,
  /// and its other calls have the same answer. Blocks some seconds at most.
  virtual std::exception_ptr wait_for_end() const = 0;
  /// A call has waited for these ranks of the job until `deadline`, which is that of its group and not one
  /// that the caller gave. Returns what the call throws; null: an error of its own, as where the owner cannot
  /// continue without them. `where` names the call. Does not wait.
  virtual std::exception_ptr give_up(const std::vector<int>& /*ranks*/, base::Deadline /*deadline*/,
                                     const std::string& /*where*/) {
    return nullptr;
  }
  /// A call of the group, or a request to its store, begins on this thread. Throws: UsageError where the
  /// owner allows none now.
  virtual void check_call() const {}
  /// c10d's process group was handed out, and may outlast `group`. An owner that ends keeps the latter until
  /// then, as end_calls() needs it. Does not wait.
  virtual void keep(std::shared_ptr<GroupState> /*group*/) {}
  /// This thread waits for other ranks, in calls or in the store, until end_wait(). There may be such waits
  /// within it.
  virtual void begin_wait() {}
  virtual void end_wait() {}
};

/// While it exists, its thread waits. Null: for a group without an owner.
class OwnerWait {
 public:
  explicit OwnerWait(GroupOwner* owner) : owner_(owner) {
    if (owner_ != nullptr) owner_->begin_wait();
  }
  ~OwnerWait() {
    if (owner_ != nullptr) owner_->end_wait();
  }
  OwnerWait(const OwnerWait&) = delete;
  OwnerWait& operator=(const OwnerWait&) = delete;

 private:
  GroupOwner* const owner_;
};

}  // namespace cohort::comm
