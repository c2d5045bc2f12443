#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/threads/deadline.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/agent_members.h"
#include "cohort/rpc/internal/agent/message_sender.h"

namespace cohort::rpc {

/// Has an agent leave once no call is under way: together with the other workers, or alone in a dynamic
/// group. Threads: any, without the mutex of CallTables.
class AgentShutdown {
 public:
  /// `stop` ends the agent after all may leave.
  AgentShutdown(AgentCore& core, MessageSender& sender, AgentMembers& members, std::function<void()> stop)
      : core_(core), sender_(sender), members_(members), stop_(std::move(stop)) {}

  /// Leaves, or returns when another thread has. Throws: TimeoutError that names what is missing.
  void run(base::Deadline deadline);
  /// A worker is in shutdown(); it has nothing to do where there is a report.
  void on_report(const std::string& worker, std::optional<IdleReport> report);

 private:
  void leave(base::Deadline deadline);
  void wait_for_all(base::Deadline deadline);
  std::optional<IdleReport> next_report();
  void send_report(const std::optional<IdleReport>& report);
  std::string describe_missing() const;

  AgentCore& core_;
  CallTables& tables_ = core_.tables;
  MessageSender& sender_;
  AgentMembers& members_;
  const std::function<void()> stop_;
};

}  // namespace cohort::rpc
