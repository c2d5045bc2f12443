#include "cohort/launch/internal/members/run_end.h"

#include "cohort/base/error.h"

namespace cohort::launch {

int status_of_end(const MemberLink& member, AgentOutput& output) {
  const membership::MemberView& view = member.view();
  if (!view.failure.empty()) {
    throw RendezvousError(
        "launch.run", view.failure,
        member.is_embedded()
            ? "look at the agent at --rdzv-endpoint; all nodes need the same flags and secret"
            : "the same flags and secret on all nodes, and a --rdzv-id of this run's own");
  }
  const membership::RendezvousRecord& record = *view.record;
  if (record.state == membership::RunState::kSucceeded) return 0;
  if (record.state == membership::RunState::kStopped) {
    output.log(base::LogLevel::kInfo,
               record.end_cause + "; the same command resumes it from its last checkpoint");
    return record.exit_status;
  }
  if (record.exit_status == 0) throw RendezvousError("launch.run", "the run has failed: " + record.end_cause);
  output.log(base::LogLevel::kError, "the run has failed: " + record.end_cause);
  return record.exit_status;
}

}  // namespace cohort::launch
