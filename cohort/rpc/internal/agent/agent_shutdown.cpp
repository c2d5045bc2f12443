// How an agent leaves. shutdown() asks IdleReports when no call is under way. A worker has nothing to do where
// `pending_` and `running_` are empty, and no function that follows from a result runs (`num_finishing_`). What a
// call begins or ends is counted in `counts_` under the mutex, together with these: each call once at its caller,
// unless it is never sent, and once at its callee.
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
    in_shutdown_.insert(worker);
    reports_.set(static_cast<std::size_t>(workers_.id_of(worker)), std::move(report));
  }
  changed_.notify_all();
}

// Under the mutex.
std::string AgentState::missing_at_shutdown() const {
  std::vector<std::string> parts;
  for (const auto& [name, worker] : workers_.by_name()) {
    if (name == self_.name || !worker.down.empty()) continue;
    if (in_shutdown_.count(name) == 0) {
      parts.push_back(name + ", which has not come to shutdown()");
    } else if (!reports_.has(static_cast<std::size_t>(worker.info.id))) {
      parts.push_back(name + ", which has calls under way, or has given up");
    }
  }
  for (const auto& [id, pending] : pending_)
    parts.push_back(describe(id, pending) + ", which is not answered");
  for (const auto& [key, running] : running_) {
    parts.push_back(base::concat("the handler of call ", key.second, " of ", key.first));
  }
  if (num_finishing_ > 0) parts.emplace_back("a function that a result of a call leads to");
  if (const auto call = reports_.find_call(); call && parts.empty()) {
    parts.push_back(
        base::concat("a call of ", workers_.names()[call->first], " that has not come to ", workers_.names()[call->second]));
  }
  return base::join(parts);
}

// One thread at a time leaves.
void AgentState::shutdown(base::Deadline deadline) {
  {
    std::unique_lock lock(mutex_);
    if (!base::wait(changed_, lock, [this] { return !is_leaving_; }, deadline)) {
      throw TimeoutError("rpc.shutdown",
                         "another thread is in shutdown(), and waits for " + missing_at_shutdown());
    }
    if (is_stopped_) return;
    is_leaving_ = true;
  }
  std::exception_ptr error;
  try {
    leave(deadline);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    is_leaving_ = false;
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
    last_report_.reset();
    seen = counts_;
  }
  send_leaving(std::nullopt);
  while (true) {
    std::optional<IdleReport> report;
    std::unique_lock lock(mutex_);
    const auto has_news = [&] {
      if (counts_ != seen) return false;  // calls come: at the next look
      report = next_report();
      return report.has_value() || (last_report_ == counts_ && reports_.is_over());
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
      seen = counts_;
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
  if (!pending_.empty() || !running_.empty() || num_finishing_ > 0 || last_report_ == counts_) {
    return std::nullopt;
  }
  last_report_ = counts_;
  reports_.set(static_cast<std::size_t>(self_.id), counts_);
  return counts_;
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
  std::map<std::uint64_t, Pending> calls;
  std::vector<std::stop_source> handlers;
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
    calls.swap(pending_);
    for (auto& [key, running] : running_) handlers.push_back(running.stop);
  }
  sends_->clear();
  handlers_->clear();
  for (std::stop_source& handler : handlers) handler.request_stop();  // which may answer its call
  for (auto& [id, call] : calls) {
    call.fail(std::make_exception_ptr(
        UsageError("rpc.call", describe(id, call) + ": this agent has been stopped")));
  }
}

}  // namespace cohort::rpc
