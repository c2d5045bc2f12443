#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cohort/base/threads/deadline.h"
#include "cohort/membership/member_options.h"
#include "cohort/membership/status.h"

/// An agent in the rendezvous of a run: it joins, gives signs of life, and hears of each generation. No
/// LibTorch.
///
///     membership::Member member({.settings = settings, .endpoint = "n1:29400", .is_endpoint = is_node_0,
///                                .listen = "0.0.0.0:0", .secret = secret});
///     std::uint64_t seen = 0;
///     while (member.wait_for_change(seen, base::Deadline(1s))) {
///       const membership::MemberView view = member.view();
///       seen = view.revision;
///       if (!view.failure.empty() || (view.record && view.record->has_ended())) break;
///       if (view.is_member()) run_ranks(view.record->generation);    // then member.set_status(...)
///     }
///     member.close(base::Deadline(5s));
namespace cohort::membership {

namespace member_detail {
class MemberLoop;
}

/// Has a thread of its own, and net's. Threads: any.
class Member {
 public:
  /// Begins to join; does not wait. Throws: UsageError for settings that cannot be; RendezvousError where it
  /// cannot listen.
  explicit Member(MemberOptions options);
  /// Without close() other agents see this process's death.
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// What this agent says of itself from now on. Throws: UsageError for a number of processes that cannot be.
  void set_status(MemberStatus status);
  /// The program that has this agent runs (MemberOptions::program_timeout).
  void note_alive();
  MemberView view() const;
  /// Waits until view() has another revision than `seen`; returns whether it has.
  bool wait_for_change(std::uint64_t seen, base::Deadline deadline) const;

  const std::string& incarnation() const;
  /// Where other agents reach this one.
  const std::string& address() const;

  /// Says what set_status() was given last, and goodbye. The agent that has the record first waits until all
  /// have heard of the run's end, if it has ended.
  void close(base::Deadline deadline);

 private:
  std::shared_ptr<member_detail::MemberLoop> loop_;
};

}  // namespace cohort::membership
