// How an agent leaves. shutdown() asks ShutdownState when no call is under way. A worker has nothing to do where
// `pending_` and `running_` are idle. A call is counted in `shutdown_` under the mutex, together with these: once
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
    const std::lock_guard lock(mutex_);
    shutdown_.on_report(workers_.id_of(worker), std::move(report));
  }
  changed_.notify_all();
}

// Under the mutex.
std::string AgentState::missing_at_shutdown() const {
  std::vector<std::string> parts = shutdown_.describe_missing(workers_, self_.id);
  for (std::string& call : pending_.describe()) parts.push_back(std::move(call));
  for (std::string& handler : running_.describe()) parts.push_back(std::move(handler));
  if (pending_.is_finishing()) parts.emplace_back("a function that a result of a call leads to");
  if (parts.empty()) parts.push_back(shutdown_.describe_missing_call(workers_));
  return base::join(parts);
}

// One thread at a time leaves.
void AgentState::shutdown(base::Deadline deadline) {
  {
    std::unique_lock lock(mutex_);
    if (!base::wait(changed_, lock, [this] { return !shutdown_.is_leaving(); }, deadline)) {
      throw TimeoutError("rpc.shutdown",
                         "another thread is in shutdown(), and waits for " + missing_at_shutdown());
    }
    if (shutdown_.is_stopped()) return;
    shutdown_.begin_leaving();
  }
  std::exception_ptr error;
  try {
    leave(deadline);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    shutdown_.end_leaving();
  }
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
}

void AgentState::leave(base::Deadline deadline) {
  // Calls may lead to further calls that nobody waits for. So a worker says each time that it has nothing to do, with
  // the numbers of its calls, and stays until those of all workers fit together.
  IdleReport seen;
  {
    const std::lock_guard lock(mutex_);
    seen = shutdown_.counts();
  }
  send_leaving(std::nullopt);
  while (true) {
    std::optional<IdleReport> report;
    std::unique_lock lock(mutex_);
    const auto has_news = [&] {
      if (shutdown_.counts() != seen) return false;  // calls come: at the next look
      report = next_report();
      return report.has_value() || shutdown_.is_over();
    };
    if (base::wait(changed_, lock, has_news, base::Deadline(kLook).sooner(deadline))) {
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
      seen = shutdown_.counts();
    }
  }
  for (const std::string& object : references_->describe_objects()) {
    base::log_info(base::concat("at the end of ", self_.name, ": ", object));
  }
  node_->close(deadline);
  stop();
}

// Under the mutex: what the others have yet to hear, once this worker has nothing to do.
std::optional<IdleReport> AgentState::next_report() {
  if (!pending_.is_idle() || !running_.is_idle()) return std::nullopt;
  return shutdown_.next_report(self_.id);
}

void AgentState::send_leaving(const std::optional<IdleReport>& report) {
  for (const WorkerInfo& worker : workers()) {
    if (worker == self_) continue;
    Writer out = begin_message(MessageKind::kLeaving);
    encode(out, report);
    send(worker.name, out.take());
  }
}

// What waits for events ends first, since a handler that waits may have a thread of the node; then the sources of events, what
// came meanwhile, and the threads that handlers run on.
void AgentState::stop() {
  end_calls();
  if (node_) node_->stop();
  if (timers_) timers_->stop();
  end_calls();
  if (pool_) pool_->stop(std::chrono::seconds(5));
  if (references_) references_->clear();
}

// From here on no call begins, and none is answered: others see that this worker is gone.
void AgentState::end_calls() {
  std::map<std::uint64_t, PendingCall> calls;
  std::vector<std::stop_source> handlers;
  {
    const std::lock_guard lock(mutex_);
    shutdown_.stop();
    calls = pending_.take_all();
    handlers = running_.stop_sources();
  }
  sends_->clear();
  handlers_->clear();
  for (std::stop_source& handler : handlers) handler.request_stop();  // which may answer its call
  for (auto& [id, call] : calls) {
    call.fail(
        std::make_exception_ptr(UsageError("rpc.call", call.describe(id) + ": this agent has been stopped")));
  }
}

}  // namespace cohort::rpc
