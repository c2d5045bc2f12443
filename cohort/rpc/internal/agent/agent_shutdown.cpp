// How an agent leaves. shutdown() asks ShutdownState when no call is under way. A worker has nothing to do where
// its PendingCalls and RunningCalls are idle (Note [One mutex]). A call is counted once
// at its caller, unless it is never sent, and once at its callee.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/agent_state.h"

namespace cohort::rpc {

using std::chrono::milliseconds;

namespace {

// A worker in shutdown() looks so often whether it has nothing to do. It may serve others for hours, so calls wake nobody.
constexpr milliseconds kLook(2);

}  // namespace

void AgentState::on_leaving(const std::string& worker, std::optional<IdleReport> report) {
  {
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.shutdown.on_report(core_.tables.workers.id_of(worker), std::move(report));
  }
  core_.tables.changed.notify_all();
}

// Under the mutex.
std::string AgentState::missing_at_shutdown() const {
  std::vector<std::string> parts =
      core_.tables.shutdown.describe_missing(core_.tables.workers, core_.self.id);
  for (std::string& call : core_.tables.pending.describe()) parts.push_back(std::move(call));
  for (std::string& handler : core_.tables.running.describe()) parts.push_back(std::move(handler));
  if (core_.tables.pending.is_finishing()) parts.emplace_back("a function that a result of a call leads to");
  if (parts.empty()) parts.push_back(core_.tables.shutdown.describe_missing_call(core_.tables.workers));
  return base::join(parts);
}

// One thread at a time leaves.
void AgentState::shutdown(base::Deadline deadline) {
  {
    std::unique_lock lock(core_.tables.mutex);
    if (!base::wait(
            core_.tables.changed, lock, [this] { return !core_.tables.shutdown.is_leaving(); }, deadline)) {
      throw TimeoutError("rpc.shutdown",
                         "another thread is in shutdown(), and waits for " + missing_at_shutdown());
    }
    if (core_.tables.shutdown.is_stopped()) return;
    core_.tables.shutdown.begin_leaving();
  }
  std::exception_ptr error;
  try {
    leave(deadline);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.shutdown.end_leaving();
  }
  core_.tables.changed.notify_all();
  if (error) std::rethrow_exception(error);
}

void AgentState::leave(base::Deadline deadline) {
  // Calls may lead to further calls that nobody waits for. So a worker says each time that it has nothing to do, with
  // the numbers of its calls, and stays until those of all workers fit together.
  IdleReport seen;
  {
    const std::lock_guard lock(core_.tables.mutex);
    seen = core_.tables.shutdown.counts();
  }
  send_leaving(std::nullopt);
  while (true) {
    std::optional<IdleReport> report;
    std::unique_lock lock(core_.tables.mutex);
    const auto has_news = [&] {
      if (core_.tables.shutdown.counts() != seen) return false;  // calls come: at the next look
      report = next_report();
      return report.has_value() || core_.tables.shutdown.is_over();
    };
    if (base::wait(core_.tables.changed, lock, has_news, base::Deadline(kLook).sooner(deadline))) {
      lock.unlock();
      if (!report) break;
      send_leaving(report);
    } else if (deadline.expired()) {
      const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
      const std::string missing = missing_at_shutdown();
      lock.unlock();
      send_leaving(
          std::nullopt);  // this worker may call on, so the others are to wait for its next shutdown()
      throw TimeoutError("rpc.shutdown", base::concat("waited ", waited, " ms for ", missing));
    } else {
      seen = core_.tables.shutdown.counts();
    }
  }
  for (const std::string& object : core_.references->describe_objects()) {
    base::log_info(base::concat("at the end of ", core_.self.name, ": ", object));
  }
  core_.node->close(deadline);
  stop();
}

// Under the mutex: what the others have yet to hear, once this worker has nothing to do.
std::optional<IdleReport> AgentState::next_report() {
  if (!core_.tables.pending.is_idle() || !core_.tables.running.is_idle()) return std::nullopt;
  return core_.tables.shutdown.next_report(core_.self.id);
}

void AgentState::send_leaving(const std::optional<IdleReport>& report) {
  for (const WorkerInfo& worker : workers()) {
    if (worker == core_.self) continue;
    Writer out = begin_message(MessageKind::kLeaving);
    encode(out, report);
    sender_.send(worker.name, out.take());
  }
}

// What waits for events ends first, since a handler that waits may have a thread of the node; then the sources of events, what
// came meanwhile, and the threads that handlers run on.
void AgentState::stop() {
  end_calls();
  if (core_.node) core_.node->stop();
  if (core_.timers) core_.timers->stop();
  end_calls();
  if (core_.pool) core_.pool->stop(std::chrono::seconds(5));
  if (core_.references) core_.references->clear();
}

// From here on no call begins, and none is answered: others see that this worker is gone.
void AgentState::end_calls() {
  std::map<std::uint64_t, PendingCall> calls;
  std::vector<std::stop_source> handlers;
  {
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.shutdown.stop();
    calls = core_.tables.pending.take_all();
    handlers = core_.tables.running.stop_sources();
  }
  sender_.stop();
  server_.stop();
  for (std::stop_source& handler : handlers) handler.request_stop();  // which may answer its call
  for (auto& [id, call] : calls) {
    call.fail(
        std::make_exception_ptr(UsageError("rpc.call", call.describe(id) + ": this agent has been stopped")));
  }
}

}  // namespace cohort::rpc
