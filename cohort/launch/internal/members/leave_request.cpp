// A node that leaves is awaited while it is a member, and while the run forms and it is a holder: the others
// may have nobody else to copy the state from. Both end after its patience, since those that are to make a
// generation without it may be gone.
#include "cohort/launch/internal/members/leave_request.h"

#include <signal.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/process.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;

// For a generation without this node, since the notice or since the last piece of the state was copied: an
// agent that decides, and is gone itself, is given up after four times the silence.
constexpr int kSilences = 10;
constexpr milliseconds kLeastPatience(2'000);

}  // namespace

LeaveRequest::LeaveRequest(const RunOptions& options, MemberLink& member, AgentOutput& output)
    : notice_file_(options.rendezvous.notice_file),
      // Ranks need most of the time in which the node is to be gone.
      patience_(std::min(std::max(kLeastPatience, kSilences * options.rendezvous.silence),
                         options.shutdown_timeout / 4)),
      is_elastic_(options.rendezvous.is_elastic),
      member_(member),
      output_(output) {}

void LeaveRequest::check_notice_file(const RunOptions& options) {
  const std::filesystem::path& file = options.rendezvous.notice_file;
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return;
  throw UsageError("launch.run", concat("the notice file ", file.string(), " is there already"),
                   "remove it before the start");
}

void LeaveRequest::receive(int signal) {
  if (stop_.receive(signal) == StopRequest::SignalType::kFirst) begin(base::describe_signal(signal));
  stop_.begin_repeat_time();
}

void LeaveRequest::look_for_notice() {
  std::error_code ignored;
  if (notice_file_.empty() || has_begun() || !std::filesystem::exists(notice_file_, ignored)) return;
  // A signal that follows is the same notice.
  stop_.adopt(SIGTERM);
  begin("the notice file " + notice_file_.string());
}

void LeaveRequest::extend() {
  if (has_begun() && !ends_run_) out_by_ = base::Deadline(patience_);
}

void LeaveRequest::begin(const std::string& cause) {
  base::reach_fault_point("notice");
  if (is_elastic_ && member_.is_needed()) {
    ends_run_ = true;
    output_.log(
        base::LogLevel::kInfo,
        concat(cause,
               ": the run ends, as it cannot continue without this node; a second signal kills the ranks"));
    return;
  }
  membership::MemberStatus status = member_.status();
  status.is_leaving = true;
  member_.set_status(status);
  base::reach_fault_point("notice said");
  out_by_ = base::Deadline(patience_);
  output_.log(base::LogLevel::kInfo,
              concat(cause, ": this node leaves the run; a second signal kills its ranks"));
}

bool LeaveRequest::keeps_state() const {
  const bool has_time = is_elastic_ && has_begun() && !ends_run_ && !out_by_.expired();
  return has_time && member_.has_state_of_forming_run();
}

bool LeaveRequest::is_out() const {
  const bool is_awaited = member_.view().is_member() || keeps_state();
  return ends_run_ || member_.is_over() || !is_awaited || out_by_.expired();
}

}  // namespace cohort::launch
