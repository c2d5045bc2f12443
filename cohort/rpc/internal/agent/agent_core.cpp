#include "cohort/rpc/internal/agent/agent_core.h"

#include <exception>
#include <utility>

namespace cohort::rpc {
namespace {

// Nested calls may have made many threads.
constexpr std::chrono::seconds kIdleTime(5);
constexpr std::size_t kNumKept = 4;

}  // namespace

AgentCore::AgentCore(WorkerInfo self, AgentOptions options)
    : self(std::move(self)),
      options(std::move(options)),
      timeout(this->options.timeout),
      contexts(this->self.id),
      tables(this->self.id),
      counters(this->self.name) {}

void AgentCore::start(const std::shared_ptr<AgentState>& agent, std::shared_ptr<References> its_references) {
  owner = agent;
  references = std::move(its_references);
  pool = std::make_unique<base::ThreadPool>(base::ThreadPool::Options{
      .name = "rpc", .max_threads = options.num_threads, .idle_time = kIdleTime, .num_kept = kNumKept});
  timers = std::make_unique<Timers>();
}

std::int32_t AgentCore::id_of(const std::string& worker) const {
  const std::lock_guard lock(tables.mutex);
  return tables.workers.id_of(worker);
}

WorkerInfo AgentCore::worker(std::int32_t id) const {
  const std::lock_guard lock(tables.mutex);
  return tables.workers.received(id);
}

void AgentCore::trace_counters() {
  if (!counters.is_due()) return;
  CounterTrace::Values values;
  values.references = references->num_holds();
  {
    const std::lock_guard lock(tables.mutex);
    values.pending_calls = tables.pending.size();
    for (const auto& [name, worker] : tables.workers.by_name()) {
      if (worker.peer != nullptr) values.bytes_on_the_way += worker.peer->metrics().bytes_on_the_way;
    }
  }
  counters.record(values);
}

// The node's thread must not wait: what is freed may have destructors that take long.
void AgentCore::free_later(std::shared_ptr<void> what) const {
  if (what == nullptr) return;
  try {
    pool->submit("freeing", [what = std::move(what)]() mutable { what.reset(); });
  } catch (const std::exception&) {  // it has been freed here: no thread can be had, or the agent ends
  }
}

}  // namespace cohort::rpc
