// How an agent joins the other workers and sees their ends. Its own end: agent_shutdown.cpp. Its calls:
// agent_calls.cpp, agent_handlers.cpp.
//
// The rendezvous of workers is two rounds over the store: which host each is on, then name, address and functions of each.
// The first round says which pairs use local sockets, and whether those are enough. A worker that has joined
// earlier may connect, call or die while this one still reads the store; such events are kept in early_events_ and
// handled after the join. Which process is heard as which worker: worker_table.cpp.
//
// Nothing waits but join() and shutdown(): results are set by the node's thread, handlers run on the pool,
// deadlines on the timers' thread. Promises are set, messages sent and handlers stopped without the mutex, because
// each of these may call back into the agent. The exception is a promise whose future nobody has yet.
#include "cohort/rpc/internal/agent/agent_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/secret.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/agent/handler_scope.h"
#include "cohort/rpc/internal/recorded_part.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {

using nlohmann::json;

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
      server_(core_, sender_),
      trace_(core_.self.name) {}

AgentState* AgentState::of_handler() {
  const AgentCore* const agent = HandlerScope::agent();
  return agent == nullptr ? nullptr : agent->owner.lock().get();
}

void AgentState::join(int world_size, base::KeyValueStore& store) {
  const base::Deadline deadline(core_.options.join_timeout);
  core_.start(shared_from_this(), std::make_shared<References>(core_.self.id, weak_from_this()));
  // A second agent of this worker over the same store joins the second ones of the others.
  const std::int64_t round = store.add(base::concat("rpc/agents of ", core_.self.id), 1);
  const auto gather = [&](const char* key, const std::string& word) {
    base::Words words = base::all_gather_words(store, base::concat("rpc/", round, '/', key), core_.self.id,
                                               world_size, word, deadline);
    if (words.missing.empty()) return words.of_rank;
    throw RendezvousError(
        "rpc.join", base::concat("of ", world_size, " workers these did not come within ",
                                 core_.options.join_timeout.count(), " ms: ", base::join(words.missing)));
  };
  const std::vector<std::string> hosts = gather("host", base::machine_id());
  const std::string& host = hosts[static_cast<std::size_t>(core_.self.id)];
  const auto workers_of_host = static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
  make_node(workers_of_host);
  // Workers of one host use local sockets, and so shared memory. Where there are other hosts too, each has two addresses.
  const auto listen_locally = [this] { return core_.node->listen("unix:@cohort-" + base::random_word()); };
  const bool is_auto = core_.options.listen == "auto", is_one_host = workers_of_host == world_size;
  const std::string local = is_auto && !is_one_host ? listen_locally() : "";
  const std::string address = is_auto && is_one_host
                                  ? listen_locally()
                                  : core_.node->listen(is_auto ? "0.0.0.0:0" : core_.options.listen);
  const std::map<std::string, std::string> signatures = all_signatures();
  const json own = {{"name", core_.self.name},
                    {"address", address},
                    {"local", local},
                    {"incarnation", core_.node->incarnation()},
                    {"functions", signatures}};
  const std::vector<std::string> words = gather("join", own.dump());
  std::vector<std::string> addresses;
  {
    const std::lock_guard lock(core_.tables.mutex);
    const auto size = static_cast<std::size_t>(world_size);
    core_.tables.shutdown.set_num_workers(size);
    std::vector<KnownWorker> workers(size);
    for (int id = 0; id < world_size; ++id) {
      const json word = json::parse(words[static_cast<std::size_t>(id)]);
      const bool is_local = hosts[static_cast<std::size_t>(id)] == host && !word.value("local", "").empty();
      addresses.push_back(word.at(is_local ? "local" : "address"));
      KnownWorker& worker = workers[static_cast<std::size_t>(id)];
      worker.info = {word.at("name"), id};
      worker.incarnation = word.at("incarnation").get<std::string>();
      worker.signatures = word.at("functions").get<std::map<std::string, std::string>>();
    }
    core_.tables.workers.set(std::move(workers));
  }
  connect(addresses, deadline);
  handle_early_events();
}

void AgentState::make_node(int workers_of_host) {
  net::NodeOptions options;
  options.name = core_.self.name;
  options.secret = core_.options.secret;
  options.tls = core_.options.tls;
  options.silence = core_.options.silence;
  options.heartbeat = std::min(options.heartbeat, core_.options.silence / 8);
  options.allocate = allocate_payload;
  options.shared_cache = core_.options.shared_cache;
  const bool has_cores = workers_of_host <= base::CpuSet::of_process().size();
  options.spin = core_.options.spin.value_or(std::chrono::microseconds(has_cores ? 50 : 0));
  core_.node = std::make_unique<net::Node>(std::move(options), std::make_shared<Handler>(weak_from_this()));
}

void AgentState::handle_early_events() {
  while (true) {
    std::optional<EarlyEvents::Events> events;
    {
      const std::lock_guard lock(core_.tables.mutex);
      events = early_events_.take();
    }
    if (!events) return;
    for (auto& [peer, message] : events->messages) {
      if (is_worker(peer)) take(peer->name(), std::move(message));
    }
    for (const auto& [peer, why] : events->down) end_worker(peer, why);
  }
}

void AgentState::connect(const std::vector<std::string>& addresses, base::Deadline deadline) {
  for (int id = 0; id < core_.self.id; ++id) {
    const std::shared_ptr<net::Peer> peer =
        core_.node->connect(addresses[static_cast<std::size_t>(id)], deadline);
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.workers.on_connected(id, peer);
  }
  std::unique_lock lock(core_.tables.mutex);
  if (!base::wait(
          core_.tables.changed, lock, [&] { return core_.tables.workers.not_connected().empty(); },
          deadline)) {
    throw RendezvousError(
        "rpc.join", base::concat("these workers did not connect within ", core_.options.join_timeout.count(),
                                 " ms: ", base::join(core_.tables.workers.not_connected())));
  }
}

void AgentState::on_connect(const std::shared_ptr<net::Peer>& peer) {
  {
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.workers.on_connect(peer);
  }
  core_.tables.changed.notify_all();
}

void AgentState::end_context(ContextId id) {
  sender_.send_effects(core_.contexts.end(id));
}

void AgentState::on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) {
  {
    const std::lock_guard lock(core_.tables.mutex);
    if (early_events_.keep(peer, message)) return;
  }
  if (is_worker(peer)) take(peer->name(), std::move(message));
}

bool AgentState::is_worker(const std::shared_ptr<net::Peer>& peer) const {
  const std::lock_guard lock(core_.tables.mutex);
  return core_.tables.workers.is_worker(peer);
}

void AgentState::end_worker(const std::shared_ptr<net::Peer>& peer, const std::string& why) {
  const std::string& name = peer->name();
  std::vector<std::pair<std::uint64_t, std::string>> calls;
  std::vector<RunningCalls::Key> handlers;
  std::optional<std::int32_t> worker;
  {
    const std::lock_guard lock(core_.tables.mutex);
    worker = core_.tables.workers.on_down(peer, why);
    if (!worker) return;
    core_.tables.shutdown.on_down(*worker);
    calls = core_.tables.pending.of_worker(name);
    handlers = core_.tables.running.of_caller(name);
  }
  for (const auto& [id, what] : calls)
    fail(id, std::make_exception_ptr(PeerError("rpc.call", what + ": " + why)));
  for (const RunningCalls::Key& key : handlers) server_.cancel(key);
  core_.references->on_down(*worker, why);
  sender_.send_effects(core_.contexts.on_down(*worker));
  core_.tables.changed.notify_all();
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
