#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cohort/base/secret.h"
#include "cohort/launch/internal/members/change_signal.h"
#include "cohort/launch/run_options.h"
#include "cohort/membership/member.h"

/// An agent's part in the rendezvous of a run whose members may change. No LibTorch. Not for users of the
/// library.
namespace cohort::launch {

/// By which name or address other hosts reach this one, where they reach the rendezvous endpoint. Throws:
/// RendezvousError.
std::string own_host(const RunOptions& options);

/// Where this agent listens for others, as net::Node::listen() takes it, where it is not the one at the
/// endpoint. Throws: as own_host().
std::string listen_address(const RunOptions& options);

/// This agent in the rendezvous, as its loop sees it. Threads: one caller.
class MemberLink {
 public:
  /// Begins to join, with this status; does not wait. The agent that the endpoint names listens there and has
  /// the record, unless another one does already. Throws: RendezvousError where the endpoint cannot be had;
  /// UsageError.
  MemberLink(const RunOptions& options, const std::optional<base::Secret>& secret,
             membership::MemberStatus status);

  /// Readable when update() has news.
  int fd() const { return changed_->fd(); }
  /// Takes the newest view. Returns whether it is another one. To be called several times a second: an agent
  /// that does not for 40 s is silent for others, until it does.
  bool update();
  const membership::MemberView& view() const { return view_; }

  const membership::MemberStatus& status() const { return status_; }
  void set_status(const membership::MemberStatus& status);

  /// Number of the newest generation, if this agent is a member of it; else 0.
  std::uint64_t generation() const { return view_.is_member() ? view_.record->generation.number : 0; }
  /// The run has ended, or this agent can have no part in it any more.
  bool is_over() const { return !view_.failure.empty() || has_ended(); }
  /// Or a signal has stopped it: all ranks have made what they had to.
  bool has_succeeded() const { return has_ended() && view_.record->state != membership::RunState::kFailed; }
  /// The signal that has stopped the run; 0: none has.
  int stop_signal() const { return view_.record ? view_.record->stop_signal() : 0; }
  /// The record is in an agent, and not in etcd.
  bool is_embedded() const { return is_embedded_; }
  bool has_ended() const { return view_.record && view_.record->has_ended(); }
  /// Whether the run ends where this member leaves: it has the only record, or etcd has it and there is no
  /// other node.
  bool is_needed() const;
  /// Whether the run forms again, and this node's ranks have its state: who comes gets it from them.
  bool has_state_of_forming_run() const;
  /// What this agent waits for, if that is another thing than the last time: "waits for nodes: 1 of at least
  /// 2 are there". Else empty, also for a member, and at the end.
  std::string new_wait();

  /// Says goodbye; waits 5 s at most.
  void close();

 private:
  std::string waits_for() const;

  const bool is_embedded_;
  std::shared_ptr<ChangeSignal> changed_;  // also of the member's threads
  membership::MemberStatus status_;
  std::unique_ptr<membership::Member> member_;
  membership::MemberView view_;
  std::string wait_;
};

}  // namespace cohort::launch
