// What comes from other workers. Messages come on the node's thread, which must not wait: take() decodes and
// dispatches.
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/internal/agent/handler_scope.h"
#include "cohort/rpc/internal/wire.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {

void AgentState::on_down(const std::shared_ptr<net::Peer>& peer, const std::string& why) {
  const DeliveryScope delivery;
  {
    const std::lock_guard lock(core_.tables.mutex);
    if (early_events_.keep_down(peer, why)) return;
  }
  end_worker(peer, why);
}

void AgentState::take(const std::string& from, net::Message message) {
  const DeliveryScope delivery;
  bool is_call = false;
  try {
    std::shared_ptr<void> credit = std::move(message.credit);
    auto [encoded, wires] = to_encoded(message);
    Reader in(&encoded);
    const auto kind = static_cast<MessageKind>(in.number<std::uint8_t>());
    const auto id = in.number<std::uint64_t>();
    is_call = kind == MessageKind::kCall || kind == MessageKind::kMake;
    encoded.references = receive_references(wires, from);
    if (kind == MessageKind::kResult || kind == MessageKind::kError) client_.check_answer(from, id);
    switch (kind) {
      case MessageKind::kCall:
        return server_.on_call(from, id, in, std::move(credit));
      case MessageKind::kMake:
        return server_.on_make(from, id, in, std::move(credit));
      case MessageKind::kResult: {
        const References::List references = encoded.references;
        return client_.on_result(id, in.rest(), references);
      }
      case MessageKind::kError:
        return client_.on_error(id, decode<RemoteException>(in));
      case MessageKind::kCancel: {
        const auto sequence = in.number<std::uint64_t>();
        return server_.on_cancel({from, id}, sequence, decode<RemoteException>(in));
      }
      case MessageKind::kReference:
        return on_reference(from, in);
      case MessageKind::kContext:
        return on_context_message(from, in);
      case MessageKind::kLeaving:
        return shutdown_.on_report(from, decode<std::optional<IdleReport>>(in));
    }
    throw CommError("rpc.receive", base::concat("a message is of kind ", static_cast<int>(kind)));
  } catch (const CommError& error) {
    // Whoever sent it has the secret, so it is another program. Its call ends at its deadline.
    base::log_error(base::concat("a message of ", from, " is dropped: ", base::message_of(error)));
  } catch (const std::exception& error) {
    base::log_error(base::concat("a message of ", from, " cannot be handled: ", base::message_of(error)));
  }
  if (is_call) count_received(from);  // shutdown() is not to wait for it
}

void AgentState::count_received(const std::string& caller) {
  const std::lock_guard lock(core_.tables.mutex);
  core_.tables.shutdown.count_received(core_.tables.workers.id_of(caller));
}

References::List AgentState::receive_references(const std::vector<WireReference>& wires,
                                                const std::string& from) {
  if (wires.empty()) return {};
  for (const WireReference& wire : wires) core_.worker(wire.owner);  // throws for an unknown one
  return core_.references->receive(wires, core_.id_of(from));
}

void AgentState::on_reference(const std::string& from, Reader& in) {
  const ReferenceMessage message = read_reference_message(in);
  in.finish();
  core_.references->on_message(core_.id_of(from), message);
}

void AgentState::on_context_message(const std::string& from, Reader& in) {
  const ContextMessage message = read_context_message(in);
  in.finish();
  sender_.send_effects(core_.contexts.on_message(core_.id_of(from), message));
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
      if (const auto worker = worker_of(peer)) take(*worker, std::move(message));
    }
    for (const auto& [peer, why] : events->down) end_worker(peer, why);
  }
}

void AgentState::on_connect(const std::shared_ptr<net::Peer>& peer) {
  {
    const std::lock_guard lock(core_.tables.mutex);
    core_.tables.workers.on_connect(peer);
  }
  core_.tables.changed.notify_all();
}

void AgentState::on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) {
  if (message.channel == kMemberChannel && core_.tables.workers.is_dynamic()) {
    return members_.on_message(peer, std::move(message));
  }
  {
    const std::lock_guard lock(core_.tables.mutex);
    if (early_events_.keep(peer, message)) return;
  }
  if (const auto worker = worker_of(peer)) take(*worker, std::move(message));
}

// The name by which the tables know the worker that the process is heard as.
std::optional<std::string> AgentState::worker_of(const std::shared_ptr<net::Peer>& peer) const {
  const std::lock_guard lock(core_.tables.mutex);
  const KnownWorker* const worker = core_.tables.workers.find_by_peer(peer);
  return worker == nullptr ? std::nullopt : std::optional(worker->info.name);
}

void AgentState::end_worker(const std::shared_ptr<net::Peer>& peer, const std::string& why) {
  std::vector<std::pair<std::uint64_t, std::string>> calls;
  std::vector<RunningCalls::Key> handlers;
  std::optional<std::int32_t> worker;
  {
    const std::lock_guard lock(core_.tables.mutex);
    worker = core_.tables.workers.on_down(peer, why);
    if (!worker) return;
    core_.tables.shutdown.on_down(*worker);
    const std::string& name = core_.tables.workers.worker_of(*worker).info.name;
    calls = core_.tables.pending.of_worker(name);
    handlers = core_.tables.running.of_caller(name);
    core_.tables.running.forget_arrivals_of(name);
  }
  for (const auto& [id, what] : calls)
    client_.fail(id, std::make_exception_ptr(PeerError("rpc.call", what + ": " + why)));
  for (const RunningCalls::Key& key : handlers) server_.cancel(key, {"PeerError", why});
  core_.references->on_down(*worker, why);
  sender_.send_effects(core_.contexts.on_down(*worker));
  core_.tables.changed.notify_all();
}

}  // namespace cohort::rpc
