#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/comm/internal/consistency_check.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/signature.h"

/// A call that is under way. Internal.
namespace cohort::comm {

/// Throws UsageError in the name of a group.
[[noreturn]] void reject(const std::string& what, const std::string& hint = "");

// `tensors` are those that the backend has; where one is a copy of a view, `returns` copies it back.
struct PendingState : std::enable_shared_from_this<PendingState> {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Hands the call to the backend, which may take that long for it.
  using Body = std::function<WorkPtr(std::chrono::milliseconds left)>;

  std::shared_ptr<GroupState> group;
  /// Counts this one from before the group is asked whether it has ended.
  const struct UnderWay {
    explicit UnderWay(std::atomic<int>& counted) : count(counted) { ++count; }
    ~UnderWay() { --count; }
    UnderWay(const UnderWay&) = delete;
    UnderWay& operator=(const UnderWay&) = delete;
    std::atomic<int>& count;
  } under_way;
  Signature signature;
  base::Deadline deadline;
  const bool is_groups_deadline;                // and not one that the caller gave for this call
  std::optional<GroupState::OwnTime> own_time;  // until it is done, where the group has an owner
  std::vector<at::Tensor> tensors;
  std::vector<std::pair<at::Tensor, at::Tensor>> returns;  // (view, its contiguous copy)
  WorkPtr work;
  std::uint64_t ticket = 0;  // in the group's flight record
  std::int64_t in_bytes = 0, out_bytes = 0;
  std::chrono::nanoseconds held{0};  // what the caller waited
  int row = -1;                      // of the timeline

  PendingState(std::shared_ptr<GroupState> of, const char* call, std::chrono::milliseconds timeout);
  ~PendingState();

  /// A contiguous tensor to give to the backend in place of `tensor`.
  at::Tensor in(const at::Tensor& tensor);
  at::Tensor out(const at::Tensor& tensor, bool reads);
  std::chrono::milliseconds left() const;

  /// Numbers the call and has `body` hand it to the backend: at once, or on the group's thread where it is to
  /// be compared with the other ranks' first, or comes after one that is.
  void begin(const CallDetails& details, const Body& body);
  /// The same for send and recv, which only two ranks know of.
  void begin_message(const CallDetails& details, const Body& body);
  /// Returns once `body` has handed it over. Throws what came of that.
  void wait_until_begun();
  void finish();
  /// The caller waits no more: the group's thread does not hand the call over afterwards. False where it has,
  /// or does so now.
  bool cancel() { return step_on(Step::kCancelled); }

  base::Future<void> beginning;  // on the group's thread; not valid once it is known what came of it
  std::atomic<bool> has_left_queue{false};  // all calls before it have begun

 private:
  // Of a call that was given to the group's thread. Only one of the two can follow the first.
  enum class Step : std::uint8_t { kQueued, kHandedOver, kCancelled };
  bool step_on(Step next) {
    Step expected = Step::kQueued;
    return step_.compare_exchange_strong(expected, next);
  }
  void begin_from_queue(const std::optional<Fingerprint>& fingerprint, const Body& body);
  void compare(const Fingerprint& fingerprint);
  void count();
  void hand_over(const Body& body);
  void hand_over_collective(const Body& body);
  void end_work(c10d::Work& running, const std::exception& error, base::Deadline until);
  bool is_on_gpu() const;
  std::string describe() const;
  /// What is asked of others on the way is asked until then.
  [[noreturn]] void fail(const std::exception& error, base::Deadline until);
  [[noreturn]] void fail(const std::exception& error) { fail(error, group->end_of_failure(deadline)); }

  std::atomic<Step> step_{Step::kQueued};
};

}  // namespace cohort::comm
