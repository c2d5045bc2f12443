// How an agent leaves. shutdown() asks ShutdownState when no call is under way. A worker has nothing to do
// where its PendingCalls and RunningCalls are idle (Note [One mutex]). A call is counted once at its caller,
// unless it is never sent, and once at its callee.
#include "cohort/rpc/internal/agent/agent_shutdown.h"

#include <chrono>
#include <exception>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/agent/agent_messages.h"

namespace cohort::rpc {

using std::chrono::milliseconds;

namespace {

// A worker in shutdown() looks so often whether it has nothing to do. It may serve others for hours, so calls
// wake nobody.
constexpr milliseconds kLook(2);

}  // namespace

void AgentShutdown::on_report(const std::string& worker, std::optional<IdleReport> report) {
  {
    const std::lock_guard lock(tables_.mutex);
    tables_.shutdown.on_report(tables_.workers.id_of(worker), std::move(report));
  }
  tables_.changed.notify_all();
}

// Under the mutex.
std::string AgentShutdown::describe_missing() const {
  if (tables_.workers.is_dynamic()) return base::join(members_.describe_missing());
  std::vector<std::string> parts = tables_.shutdown.describe_missing(tables_.workers, core_.self.id);
  for (std::string& call : tables_.pending.describe()) parts.push_back(std::move(call));
  for (std::string& handler : tables_.running.describe()) parts.push_back(std::move(handler));
  if (tables_.pending.is_finishing()) parts.emplace_back("a function that a result of a call leads to");
  if (parts.empty()) parts.push_back(tables_.shutdown.describe_missing_call(tables_.workers));
  return base::join(parts);
}

// One thread at a time leaves.
void AgentShutdown::run(base::Deadline deadline) {
  {
    std::unique_lock lock(tables_.mutex);
    if (!base::wait(tables_.changed, lock, [this] { return !tables_.shutdown.is_leaving(); }, deadline)) {
      throw TimeoutError("rpc.shutdown",
                         "another thread is in shutdown(), and waits for " + describe_missing());
    }
    if (tables_.shutdown.is_stopped()) return;
    tables_.shutdown.begin_leaving();
  }
  std::exception_ptr error;
  try {
    leave(deadline);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(tables_.mutex);
    tables_.shutdown.end_leaving();
  }
  tables_.changed.notify_all();
  if (error) std::rethrow_exception(error);
}

void AgentShutdown::leave(base::Deadline deadline) {
  if (tables_.workers.is_dynamic()) {
    members_.leave(deadline);
  } else {
    wait_for_all(deadline);
  }
  for (const std::string& object : core_.references->describe_objects()) {
    base::log_info(base::concat("at the end of ", core_.self.name, ": ", object));
  }
  core_.node->close(deadline);
  stop_();
}

void AgentShutdown::wait_for_all(base::Deadline deadline) {
  // Calls may lead to further calls that nobody waits for. So a worker says each time that it has nothing to
  // do, with the numbers of its calls, and stays until those of all workers fit together.
  IdleReport seen;
  {
    const std::lock_guard lock(tables_.mutex);
    seen = tables_.shutdown.counts();
  }
  send_report(std::nullopt);
  while (true) {
    std::optional<IdleReport> report;
    std::unique_lock lock(tables_.mutex);
    const auto has_news = [&] {
      if (tables_.shutdown.counts() != seen) return false;  // calls come: at the next look
      report = next_report();
      return report.has_value() || tables_.shutdown.is_over();
    };
    if (base::wait(tables_.changed, lock, has_news, base::Deadline(kLook).sooner(deadline))) {
      lock.unlock();
      if (!report) break;
      send_report(report);
    } else if (deadline.expired()) {
      const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
      const std::string missing = describe_missing();
      lock.unlock();
      send_report(
          std::nullopt);  // this worker may call on, so the others are to wait for its next shutdown()
      throw TimeoutError("rpc.shutdown", base::concat("waited ", waited, " ms for ", missing));
    } else {
      seen = tables_.shutdown.counts();
    }
  }
}

// Under the mutex: what the others have yet to hear, once this worker has nothing to do.
std::optional<IdleReport> AgentShutdown::next_report() {
  if (!tables_.pending.is_idle() || !tables_.running.is_idle()) return std::nullopt;
  return tables_.shutdown.next_report(core_.self.id);
}

void AgentShutdown::send_report(const std::optional<IdleReport>& report) {
  std::vector<WorkerInfo> workers;
  {
    const std::lock_guard lock(tables_.mutex);
    workers = tables_.workers.infos();
  }
  for (const WorkerInfo& worker : workers) {
    if (worker == core_.self) continue;
    Writer out = begin_message(MessageKind::kLeaving);
    encode(out, report);
    sender_.send(worker.name, out.take());
  }
}

}  // namespace cohort::rpc
