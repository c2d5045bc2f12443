// Every call has a number of its agent's own, and ends once: by its answer, its deadline, or the end of its worker. Whoever
// takes it out of `pending_` ends it. Every call that is answered stands in `running_` until its answer is on its way; a
// caller that gave up or is gone takes it out, and asks the handler to stop.
//
// Messages: a byte that says which, the number of the call, and what belongs to it. Short ones share a channel, so they stay
// in order and go before long ones; a long one has a channel of its own.
//
// Nothing here waits but join() and shutdown(): results are set by the node's thread, handlers run on the pool, deadlines on
// the timers' thread.
#include "cohort/rpc/internal/agent_state.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

enum class MessageKind : std::uint8_t { kCall = 1, kResult, kError, kCancel, kLeaving };

constexpr std::uint32_t kShortChannel = 0;
constexpr std::size_t kShortBytes = 64 * 1024;

Writer begin_message(MessageKind kind, std::uint64_t id) {
  Writer out;
  out.number(static_cast<std::uint8_t>(kind));
  out.number(id);
  return out;
}

std::int64_t nanoseconds_left(base::Deadline deadline) {
  if (deadline.is_never()) return std::numeric_limits<std::int64_t>::max();
  return std::chrono::duration_cast<nanoseconds>(deadline.remaining()).count();
}

std::exception_ptr error_of(const RemoteException& exception, const std::string& where) {
  try {
    throw_remote(exception, where);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

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
    if (const auto state = state_.lock()) state->on_down(peer->name(), down.text);
  }

 private:
  const std::weak_ptr<AgentState> state_;
};

AgentState::AgentState(WorkerInfo self, AgentOptions options)
    : self_(std::move(self)), options_(std::move(options)) {}

void AgentState::join(int world_size, base::KeyValueStore& store) {
  const base::Deadline deadline(options_.join_timeout);
  pool_ = std::make_unique<base::ThreadPool>(
      base::ThreadPool::Options{.name = "rpc", .max_threads = options_.num_threads});
  timers_ = std::make_unique<Timers>();
  net::NodeOptions node;
  node.name = self_.name;
  node.secret = options_.secret;
  node.silence = options_.silence;
  node_ = std::make_unique<net::Node>(std::move(node), std::make_shared<Handler>(weak_from_this()));
  const std::map<std::string, std::string> signatures = all_signatures();
  const json own = {
      {"name", self_.name}, {"address", node_->listen(options_.listen)}, {"functions", signatures}};
  const base::Words words =
      base::all_gather_words(store, "rpc/join", self_.id, world_size, own.dump(), deadline);
  if (!words.missing.empty()) {
    throw RendezvousError("rpc.join",
                          base::concat("of ", world_size, " workers these did not come within ",
                                       options_.join_timeout.count(), " ms: ", base::join(words.missing)));
  }
  std::vector<std::string> addresses;
  {
    const std::lock_guard lock(mutex_);
    for (int id = 0; id < world_size; ++id) {
      const json word = json::parse(words.of_rank[static_cast<std::size_t>(id)]);
      addresses.push_back(word.at("address"));
      Worker worker;
      worker.info = {word.at("name"), id};
      worker.signatures = word.at("functions").get<std::map<std::string, std::string>>();
      const std::string name = worker.info.name;
      if (const auto early = early_.find(name); early != early_.end()) worker.peer = early->second;
      if (!workers_.emplace(name, std::move(worker)).second) {
        throw UsageError("rpc.join", base::concat("two workers are named '", name, "'"),
                         "a name of its own for each");
      }
    }
  }
  connect(world_size, addresses, deadline);
}

// Each connects to those before it, and waits for those behind it.
void AgentState::connect(int world_size, const std::vector<std::string>& addresses, base::Deadline deadline) {
  for (int id = 0; id < self_.id; ++id) {
    const std::shared_ptr<net::Peer> peer = node_->connect(addresses[static_cast<std::size_t>(id)], deadline);
    const std::lock_guard lock(mutex_);
    const auto found = workers_.find(peer->name());
    if (found == workers_.end() || found->second.info.id != id) {
      throw RendezvousError("rpc.join", base::concat("at the address of worker ", id, " is ", peer->name()));
    }
    found->second.peer = peer;
  }
  std::unique_lock lock(mutex_);
  const auto missing = [&] {
    std::vector<std::string> names;
    for (const auto& [name, worker] : workers_) {
      if (worker.info.id > self_.id && worker.info.id < world_size && worker.peer == nullptr)
        names.push_back(name);
    }
    return names;
  };
  if (!base::wait(changed_, lock, [&] { return missing().empty(); }, deadline)) {
    throw RendezvousError("rpc.join",
                          base::concat("these workers did not connect within ", options_.join_timeout.count(),
                                       " ms: ", base::join(missing())));
  }
}

void AgentState::on_connect(const std::shared_ptr<net::Peer>& peer) {
  {
    const std::lock_guard lock(mutex_);
    // It may know all workers before this one does.
    const auto found = workers_.find(peer->name());
    (found == workers_.end() ? early_[peer->name()] : found->second.peer) = peer;
  }
  changed_.notify_all();
}

const AgentState::Worker& AgentState::find_worker(const std::string& name) const {
  const auto found = workers_.find(name);
  if (found != workers_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, worker] : workers_) names.push_back(known);
  throw UsageError("rpc.call",
                   base::concat("there is no worker '", name, "'; the workers are ", base::join(names)));
}

std::string AgentState::describe(std::uint64_t id, const Pending& pending) const {
  return base::concat(pending.function, " on ", pending.worker, ", call ", id);
}

base::Future<Encoded> AgentState::call(const Target& target, const char* function, Encoded arguments) {
  const milliseconds timeout = target.timeout.value_or(options_.timeout);
  const base::Deadline deadline = base::Deadline(timeout).sooner(remaining_deadline());
  Pending pending("the result of a remote call");
  pending.worker = target.worker;
  pending.function = function;
  pending.timeout = timeout;
  base::Future<Encoded> future = pending.promise.future();
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    const Worker& worker = find_worker(target.worker);
    const std::string& signature = find_function(function).signature;
    const auto there = worker.signatures.find(function);
    if (there == worker.signatures.end() || there->second != signature) {
      throw UsageError(
          "rpc.call",
          base::concat(target.worker,
                       there == worker.signatures.end() ? " has no function " : " has another function ",
                       function, ": here ", signature,
                       there == worker.signatures.end() ? "" : ", there " + there->second),
          "the same program on all workers");
    }
    id = next_call_++;
    ++metrics_.calls_made;
    if (!worker.down.empty()) {
      pending.promise.set_error(
          std::make_exception_ptr(PeerError("rpc.call", describe(id, pending) + ": " + worker.down)));
      return future;
    }
    if (!deadline.is_never()) {
      pending.timer = timers_->add(deadline.end(), [self = weak_from_this(), id] {
        if (const auto state = self.lock()) state->expire(id);
      });
    }
    pending_.emplace(id, std::move(pending));
  }
  try {
    Writer out = begin_message(MessageKind::kCall, id);
    out.text(function);
    out.number(nanoseconds_left(deadline));
    out.append(std::move(arguments));
    send(target.worker, out.take());
  } catch (...) {
    fail(id, std::current_exception());
  }
  return future;
}

void AgentState::send(const std::string& worker, Encoded encoded) {
  std::shared_ptr<net::Peer> peer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = workers_.find(worker);
    if (found == workers_.end()) return;
    peer = found->second.peer;
  }
  Reader reader(encoded);
  reader.number<std::uint8_t>();
  const auto id = reader.number<std::uint64_t>();
  net::Message message = to_message(kShortChannel, std::move(encoded));
  if (message.num_bytes() > kShortBytes) message.channel = static_cast<std::uint32_t>(1 + id % 1'000'000);
  if (peer != nullptr) return peer->send(std::move(message));
  if (worker == self_.name) take(self_.name, std::move(message));
}

void AgentState::on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) {
  take(peer->name(), std::move(message));
}

void AgentState::take(const std::string& from, net::Message message) {
  try {
    std::shared_ptr<void> credit = std::move(message.credit);
    const Encoded encoded = to_encoded(message);
    Reader in(encoded);
    const auto kind = static_cast<MessageKind>(in.number<std::uint8_t>());
    const auto id = in.number<std::uint64_t>();
    switch (kind) {
      case MessageKind::kCall:
        return on_call(from, id, in, std::move(credit));
      case MessageKind::kResult:
        return finish(id, in.rest(), nullptr);
      case MessageKind::kError:
        return on_error(id, decode<RemoteException>(in));
      case MessageKind::kCancel:
        return on_cancel({from, id});
      case MessageKind::kLeaving:
        return on_leaving(from);
    }
    throw CommError("rpc.receive", base::concat("a message is of kind ", static_cast<int>(kind)));
  } catch (const CommError& error) {
    // Whoever sent it has the secret, so it is another program. Its call ends at its deadline.
    base::log_error(base::concat("a message of ", from, " is dropped: ", base::message_of(error)));
  }
}

void AgentState::on_error(std::uint64_t id, const RemoteException& exception) {
  std::string where;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    where = describe(id, found->second);
  }
  fail(id, error_of(exception, where));
}

void AgentState::finish(std::uint64_t id, Encoded result, const std::exception_ptr& error) {
  std::map<std::uint64_t, Pending>::node_type call;
  {
    const std::lock_guard lock(mutex_);
    call = pending_.extract(id);
  }
  if (call.empty()) return;  // it had its deadline
  timers_->remove(call.mapped().timer);
  if (error) {
    call.mapped().promise.set_error(error);
  } else {
    call.mapped().promise.run([&] { return std::move(result); });
  }
  changed_.notify_all();
}

void AgentState::expire(std::uint64_t id) {
  std::string worker, text;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    worker = found->second.worker;
    text = base::concat(describe(id, found->second), ": no answer within ", found->second.timeout.count(),
                        " ms, or what was left of the call that it belongs to");
  }
  fail(id, std::make_exception_ptr(TimeoutError("rpc.call", text)));
  send(worker, begin_message(MessageKind::kCancel, id).take());
}

void AgentState::on_call(const std::string& caller, std::uint64_t id, Reader& in,
                         std::shared_ptr<void> credit) {
  const std::string function = in.text();
  const auto left = in.number<std::int64_t>();
  const RunningKey key(caller, id);
  CallContext context;
  context.caller = caller;
  if (left != std::numeric_limits<std::int64_t>::max()) context.deadline = base::Deadline(nanoseconds(left));
  {
    const std::lock_guard lock(mutex_);
    Running running;
    context.stop = running.stop.get_token();
    if (!context.deadline.is_never()) {
      running.timer = timers_->add(context.deadline.end(), [self = weak_from_this(), key] {
        if (const auto state = self.lock()) state->on_cancel(key);
      });
    }
    running_.emplace(key, std::move(running));
    ++metrics_.calls_handled;
  }
  pool_->submit("remote call", [self = shared_from_this(), key, function, arguments = in.rest(), context,
                                credit = std::move(credit)]() mutable {
    credit.reset();
    self->run(key, function, arguments, context);
  });
}

void AgentState::run(const RunningKey& key, const std::string& function, const Encoded& arguments,
                     const CallContext& context) {
  if (context.stop.stop_requested()) return;  // nobody waits any more: it does not begin
  try {
    const RemoteFunction found = find_function(function);
    const CallScope scope(context);
    found.invoke(arguments,
                 [self = shared_from_this(), key](Encoded result, const std::exception_ptr& error) {
                   self->answer(key, std::move(result), error);
                 });
  } catch (...) {
    answer(key, {}, std::current_exception());
  }
}

void AgentState::answer(const RunningKey& key, Encoded result, const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = running_.find(key);
    if (found == running_.end()) return;  // nobody waits any more
    timers_->remove(found->second.timer);
    running_.erase(found);
  }
  const auto send_error = [&](const std::exception_ptr& thrown) {
    Writer out = begin_message(MessageKind::kError, key.second);
    encode(out, describe_exception(thrown));
    send(key.first, out.take());
  };
  if (error) {
    send_error(error);
  } else {
    try {
      Writer out = begin_message(MessageKind::kResult, key.second);
      out.append(std::move(result));
      send(key.first, out.take());
    } catch (...) {  // a tensor that cannot travel
      send_error(std::current_exception());
    }
  }
  changed_.notify_all();
}

void AgentState::on_cancel(const RunningKey& key) {
  std::map<RunningKey, Running>::node_type call;
  {
    const std::lock_guard lock(mutex_);
    call = running_.extract(key);
  }
  if (call.empty()) return;
  timers_->remove(call.mapped().timer);
  call.mapped().stop.request_stop();
  changed_.notify_all();
}

void AgentState::on_down(const std::string& name, const std::string& why) {
  std::vector<std::pair<std::uint64_t, std::string>> calls;
  std::vector<RunningKey> handlers;
  {
    const std::lock_guard lock(mutex_);
    const auto found = workers_.find(name);
    if (found == workers_.end()) return;
    found->second.down = why;
    for (const auto& [id, pending] : pending_) {
      if (pending.worker == name) calls.emplace_back(id, describe(id, pending));
    }
    for (const auto& [key, running] : running_) {
      if (key.first == name) handlers.push_back(key);
    }
  }
  for (const auto& [id, what] : calls)
    fail(id, std::make_exception_ptr(PeerError("rpc.call", what + ": " + why)));
  for (const RunningKey& key : handlers) on_cancel(key);
  changed_.notify_all();
}

void AgentState::on_leaving(const std::string& worker) {
  {
    const std::lock_guard lock(mutex_);
    workers_.at(worker).has_come_to_shutdown = true;
  }
  changed_.notify_all();
}

// Under the mutex.
std::string AgentState::missing_at_shutdown() const {
  std::vector<std::string> parts;
  for (const auto& [name, worker] : workers_) {
    if (name != self_.name && !worker.has_come_to_shutdown && worker.down.empty()) {
      parts.push_back(name + ", which has not come to shutdown()");
    }
  }
  for (const auto& [id, pending] : pending_)
    parts.push_back(describe(id, pending) + ", which is not answered");
  for (const auto& [key, running] : running_) {
    parts.push_back(base::concat("the handler of call ", key.second, " of ", key.first));
  }
  return base::join(parts);
}

void AgentState::shutdown(base::Deadline deadline) {
  const auto wait_for = [&](const auto& condition) {
    std::unique_lock lock(mutex_);
    if (base::wait(changed_, lock, condition, deadline)) return;
    const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
    throw TimeoutError("rpc.shutdown", base::concat("waited ", waited, " ms for ", missing_at_shutdown()));
  };
  wait_for([this] { return pending_.empty(); });
  for (const WorkerInfo& worker : workers()) {
    if (worker != self_) send(worker.name, begin_message(MessageKind::kLeaving, 0).take());
  }
  wait_for([this] { return missing_at_shutdown().empty(); });
  node_->close(deadline);
  stop();
}

void AgentState::stop() {
  node_.reset();
  std::map<std::uint64_t, Pending> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(pending_);
    for (auto& [key, running] : running_) running.stop.request_stop();
  }
  for (auto& [id, call] : calls) {
    call.promise.set_error(std::make_exception_ptr(
        UsageError("rpc.call", describe(id, call) + ": this agent has been stopped")));
  }
  if (pool_) pool_->stop(std::chrono::seconds(5));
}

std::vector<WorkerInfo> AgentState::workers() const {
  std::vector<WorkerInfo> infos;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, worker] : workers_) infos.push_back(worker.info);
  }
  std::sort(infos.begin(), infos.end(), [](const WorkerInfo& a, const WorkerInfo& b) { return a.id < b.id; });
  return infos;
}

AgentMetrics AgentState::metrics() const {
  const std::lock_guard lock(mutex_);
  AgentMetrics metrics = metrics_;
  metrics.calls_pending = pending_.size();
  metrics.handlers_running = running_.size();
  for (const auto& [name, worker] : workers_) {
    if (worker.peer == nullptr) continue;
    const net::PeerMetrics of_peer = worker.peer->metrics();
    metrics.bytes_sent += of_peer.bytes_sent;
    metrics.bytes_received += of_peer.bytes_received;
  }
  return metrics;
}

}  // namespace cohort::rpc
