// AgentState gives each event to the part whose affair it is: CallClient makes calls, CallServer answers
// them, AgentShutdown leaves, agent_join.h joins. What comes from other workers: agent_delivery.cpp.
//
// Nothing waits but join() and shutdown(): results are set by the node's thread, handlers run on the pool,
// deadlines on the timers' thread.
#include "cohort/rpc/internal/agent/agent_state.h"

#include <map>
#include <stop_token>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/agent_join.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/handler_scope.h"
#include "cohort/rpc/internal/recorded_part.h"

namespace cohort::rpc {

class AgentState::Handler : public net::Handler {
 public:
  explicit Handler(std::weak_ptr<AgentState> state) : state_(std::move(state)) {}
  void on_connect(const std::shared_ptr<net::Peer>& peer) override {
    if (const auto state = state_.lock()) state->on_connect(peer);
  }
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override {
    if (const auto state = state_.lock()) state->on_message(peer, std::move(message));
  }
  void on_down(const std::shared_ptr<net::Peer>& peer, net::Down down) override {
    if (const auto state = state_.lock()) state->on_down(peer, down.text);
  }

 private:
  const std::weak_ptr<AgentState> state_;
};

AgentState::AgentState(WorkerInfo self, AgentOptions options)
    : core_(std::move(self), std::move(options)),
      sender_(core_, [this](net::Message message) { take(core_.self.name, std::move(message)); }),
      client_(core_, sender_),
      server_(core_, sender_),
      members_(core_),
      shutdown_(core_, sender_, members_, [this] { stop(); }) {}

AgentState* AgentState::of_handler() {
  const AgentCore* const agent = HandlerScope::agent();
  return agent == nullptr ? nullptr : agent->owner.lock().get();
}

Target AgentState::with_name(Target target) const {
  const WorkerTable& workers = core_.tables.workers;
  if (!target.id && !workers.is_dynamic()) return target;
  const std::lock_guard lock(core_.tables.mutex);
  target.worker = target.id ? workers.name_of_target(*target.id) : workers.resolve(target.worker);
  return target;
}

void AgentState::join(int world_size, base::KeyValueStore& store) {
  core_.start(shared_from_this(), std::make_shared<References>(core_.self.id, weak_from_this()));
  join_workers(core_, world_size, store, std::make_shared<Handler>(weak_from_this()));
  handle_early_events();
}

std::string AgentState::join_group(base::KeyValueStore& store, base::Deadline deadline) {
  core_.start(shared_from_this(), std::make_shared<References>(core_.self.id, weak_from_this()));
  core_.tables.pending.begin_numbers_of(core_.self.id);
  std::string why_again;
  try {
    why_again = members_.join(store, std::make_shared<Handler>(weak_from_this()), deadline);
  } catch (...) {
    members_.say_goodbye();
    throw;
  }
  if (!why_again.empty()) {
    members_.say_goodbye();
    return why_again;
  }
  // Others may still pass references to their objects on.
  for (const auto& [id, why] : members_.gone()) {
    core_.references->on_down(id, why);
    sender_.send_effects(core_.contexts.on_down(id));
  }
  handle_early_events();
  return "";
}

void AgentState::wait_for_workers(base::Deadline deadline) {
  try {
    members_.wait_for_workers(deadline);
  } catch (...) {
    members_.say_goodbye();
    throw;
  }
}

// What waits for events ends first, since a handler that waits may have a thread of the node; then the
// sources of events, what came meanwhile, and the threads that handlers run on.
void AgentState::stop() {
  end_calls();
  if (core_.node) core_.node->stop();
  if (core_.timers) core_.timers->stop();
  end_calls();
  if (core_.pool) core_.pool->stop(std::chrono::seconds(5));
  if (core_.references) core_.references->clear();
  drop_unanswered();
}

// Of handlers that have not begun, or would answer later.
void AgentState::drop_unanswered() {
  std::map<RunningCalls::Key, RunningCalls::RunningCall> calls;  // freed without the mutex
  const std::lock_guard lock(core_.tables.mutex);
  calls = core_.tables.running.take_all();
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
  if (core_.references) core_.references->fail_unset();
}

void AgentState::send_reference_message(std::int32_t to, const ReferenceMessage& message) {
  Writer out = begin_message(MessageKind::kReference);
  write_reference_message(out, message);
  sender_.send(worker(to).name, out.take());
}

void AgentState::end_context(ContextId id) {
  sender_.send_effects(core_.contexts.end(id));
}

std::vector<WorkerInfo> AgentState::workers() const {
  const std::lock_guard lock(core_.tables.mutex);
  return core_.tables.workers.infos();
}

bool AgentState::is_recording() const {
  return ContextScope::recording(core_.contexts.mark()) != nullptr;
}

std::shared_ptr<Reference> AgentState::make_here(ObjectValue value, Target::Line line) {
  if (ContextScope* const scope = ContextScope::recording(core_.contexts.mark())) {
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(core_.tables.mutex);
      number = core_.tables.pending.next_number();
    }
    record_object(*scope, {core_.self.id, number}, value);
  }
  return core_.references->create_here(std::move(value), base::concat(line.file_name(), ':', line.line()));
}

AgentMetrics AgentState::metrics() const {
  AgentMetrics metrics;
  metrics.references = core_.references->num_holds();
  metrics.rrefs = core_.references->describe_references();
  metrics.objects = core_.references->describe_objects();
  const std::lock_guard lock(core_.tables.mutex);
  core_.tables.statistics.write_to(metrics, base::Deadline::Clock::now());
  metrics.calls_pending = core_.tables.pending.size();
  metrics.calls_unanswered = core_.tables.running.size();
  metrics.handlers_queued = server_.threads().num_queued();
  metrics.handlers_on_threads = server_.threads().num_on_threads();
  metrics.contexts = core_.contexts.size();
  metrics.backwards = core_.contexts.num_backwards();
  const net::SharedMetrics shared = core_.node->shared_metrics();
  metrics.shared_bytes_in_use = shared.bytes_in_use;
  metrics.shared_bytes_cached = shared.bytes_cached;
  for (const auto& [name, worker] : core_.tables.workers.by_name()) {
    if (worker.peer == nullptr) continue;
    const net::PeerMetrics of_peer = worker.peer->metrics();
    metrics.traffic.push_back({name, worker.peer->transport(), of_peer.bytes_sent, of_peer.bytes_received,
                               of_peer.bytes_on_the_way, of_peer.bytes_queued, of_peer.queued,
                               of_peer.bytes_by_handle});
    metrics.bytes_sent += of_peer.bytes_sent;
    metrics.bytes_received += of_peer.bytes_received;
    metrics.bytes_on_the_way += of_peer.bytes_on_the_way;
    metrics.bytes_queued += of_peer.bytes_queued;
    metrics.messages_queued += of_peer.queued;
    metrics.bytes_by_handle += of_peer.bytes_by_handle;
  }
  return metrics;
}

}  // namespace cohort::rpc
