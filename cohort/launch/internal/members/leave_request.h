#pragma once

#include <chrono>
#include <filesystem>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/members/member_link.h"
#include "cohort/launch/internal/signal_queue.h"
#include "cohort/launch/internal/stop_request.h"

namespace cohort::launch {

/// The notice that this node is to leave: a signal, or the notice file. The others hear of it first, and make
/// a generation without this node; only then its ranks end. A second signal kills them. Where an elastic run
/// cannot continue without this node, nobody makes such a generation: its ranks get the signal at once, so
/// that they can save what all have.
///
/// Always: begun at most once, and never taken back. Threads: one caller, the loop of the agent. Not for
/// users of the library.
class LeaveRequest {
 public:
  /// Before this node takes part. Throws: UsageError where the notice file is there already.
  static void check_notice_file(const RunOptions& options);

  LeaveRequest(const RunOptions& options, MemberLink& member, AgentOutput& output);

  /// A signal that asks to stop has come.
  void receive(int signal);
  /// Looks for the notice file.
  void look_for_notice();
  /// The ranks of this node give the state to others, which lack it. While that gets on nobody can do without
  /// this node: it has all of its time again.
  void extend();

  bool has_begun() const { return stop_.number() != 0; }
  /// The signal for the ranks; SIGTERM after a notice file.
  int signal() const { return stop_.number(); }
  bool must_kill() const { return stop_.must_kill(); }
  /// The run cannot continue without this node.
  bool ends_run() const { return ends_run_; }
  /// The run forms again, and may get its state from this node alone: so its ranks wait for a generation.
  /// False once its time to leave is over.
  bool keeps_state() const;
  /// Its time to leave is over: it gives its state to nobody any more.
  bool is_late() const { return has_begun() && !ends_run_ && out_by_.expired(); }
  /// Nobody waits for this node any more, or its time to say so is over. For one that has begun.
  bool is_out() const;

 private:
  void begin(const std::string& cause);

  const std::filesystem::path notice_file_;
  const std::chrono::milliseconds patience_;
  const bool is_elastic_;
  MemberLink& member_;
  AgentOutput& output_;
  StopRequest stop_;
  bool ends_run_ = false;
  base::Deadline out_by_ = base::Deadline::never();
};

}  // namespace cohort::launch
