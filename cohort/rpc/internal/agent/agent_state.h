#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/call_server.h"
#include "cohort/rpc/internal/agent/early_events.h"
#include "cohort/rpc/internal/agent/message_sender.h"
#include "cohort/rpc/internal/context_scope.h"
#include "cohort/rpc/internal/telemetry/call_trace.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {

/// What an agent is made of: the calls that it made, the calls that it answers, and the workers.
class AgentState : public ReferenceHost, public std::enable_shared_from_this<AgentState> {
 public:
  AgentState(WorkerInfo self, AgentOptions options);
  void join(int world_size, base::KeyValueStore& store);
  base::Future<Encoded> call(const Target& target, const char* function, Encoded arguments) override;
  std::shared_ptr<Reference> make(const Target& target, const char* function, Encoded arguments,
                                  const std::string& asked_at) override;
  std::shared_ptr<Reference> make_here(ObjectValue value, Target::Line line);
  void shutdown(base::Deadline deadline);
  void stop();

  Contexts& contexts() { return core_.contexts; }
  /// Forgets a context here, and has those forget it that were called in it.
  void end_context(ContextId id);
  /// The agent whose handler this thread runs; null outside of handlers.
  static AgentState* of_handler();

  const WorkerInfo& self() const { return core_.self; }
  std::vector<WorkerInfo> workers() const;
  /// The same target, by the worker's name. Throws: UsageError for an unknown id.
  Target with_name(Target target) const;
  AgentMetrics metrics() const;
  std::shared_ptr<std::byte> allocate_shared(std::size_t num_bytes) const {
    return core_.node->allocate_shared(num_bytes);
  }

  void send_reference_message(std::int32_t to, const ReferenceMessage& message) override;
  WorkerInfo worker(std::int32_t id) const override { return core_.worker(id); }
  std::chrono::milliseconds timeout() const override { return core_.timeout; }
  void set_timeout(std::chrono::milliseconds timeout) { core_.timeout = timeout; }
  bool is_recording() const override;
  void free_later(std::shared_ptr<void> what) override { core_.free_later(std::move(what)); }

 private:
  class Handler;

  void make_node(int workers_of_host);
  void connect(const std::vector<std::string>& addresses, base::Deadline deadline);
  void handle_early_events();
  void on_connect(const std::shared_ptr<net::Peer>& peer);
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message);
  bool is_worker(const std::shared_ptr<net::Peer>& peer) const;
  void take(const std::string& from, net::Message message);
  void on_down(const std::shared_ptr<net::Peer>& peer, const std::string& why);
  void end_calls();
  void end_worker(const std::shared_ptr<net::Peer>& peer, const std::string& why);
  base::WaitHelper helper_of(const std::string& worker);
  SendGradients gradient_sender(const std::string& worker, std::uint64_t id,
                                const std::weak_ptr<ContextState>& context);
  base::Future<Encoded> send_gradients(const std::string& worker, std::uint64_t id,
                                       const std::shared_ptr<ContextState>& context,
                                       const std::vector<at::Tensor>& gradients);
  References::List receive_references(const std::vector<WireReference>& wires, const std::string& from);
  void on_reference(const std::string& from, Reader& in);
  void on_context_message(const std::string& from, Reader& in);
  void check_answer(const std::string& from, std::uint64_t id) const;
  void on_error(std::uint64_t id, const RemoteException& exception);
  void on_leaving(const std::string& worker, std::optional<IdleReport> report);
  void finish(std::uint64_t id, Encoded result, const std::exception_ptr& error);
  void fail(std::uint64_t id, const std::exception_ptr& error) { finish(id, {}, error); }
  void expire(std::uint64_t id);
  void attach(PendingCall& call, Encoded& result);
  void leave(base::Deadline deadline);
  void count_unsent(const std::string& worker, const std::optional<ContextCall>& in_context);
  void count_received(const std::string& caller);
  std::optional<IdleReport> next_report();
  void send_leaving(const std::optional<IdleReport>& report);
  std::string missing_at_shutdown() const;

  AgentCore core_;
  EarlyEvents early_events_;  // guarded by the mutex of CallTables
  MessageSender sender_;
  CallServer server_;
  CallTrace trace_;
};

}  // namespace cohort::rpc
