#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/agent_members.h"
#include "cohort/rpc/internal/agent/agent_shutdown.h"
#include "cohort/rpc/internal/agent/call_client.h"
#include "cohort/rpc/internal/agent/call_server.h"
#include "cohort/rpc/internal/agent/early_events.h"
#include "cohort/rpc/internal/agent/message_sender.h"

namespace cohort::rpc {

/// An agent: gives what the program asks for, and what comes from other workers, to the part whose affair it
/// is.
class AgentState : public ReferenceHost, public std::enable_shared_from_this<AgentState> {
 public:
  AgentState(WorkerInfo self, AgentOptions options);
  void join(int world_size, base::KeyValueStore& store);
  /// Joins a dynamic group. Returns "", or why it has to join again under another id.
  std::string join_group(base::KeyValueStore& store, base::Deadline deadline);
  /// After join_group(): AgentMembers::wait_for_workers().
  void wait_for_workers(base::Deadline deadline);
  base::Future<Encoded> call(const Target& target, const char* function, Encoded arguments) override {
    return client_.call(target, function, std::move(arguments));
  }
  std::shared_ptr<Reference> make(const Target& target, const char* function, Encoded arguments,
                                  const std::string& asked_at) override {
    return client_.make(target, function, std::move(arguments), asked_at);
  }
  std::shared_ptr<Reference> make_here(ObjectValue value, Target::Line line);
  void shutdown(base::Deadline deadline) { shutdown_.run(deadline); }
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

  void handle_early_events();
  void on_connect(const std::shared_ptr<net::Peer>& peer);
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message);
  void on_down(const std::shared_ptr<net::Peer>& peer, const std::string& why);
  std::optional<std::string> worker_of(const std::shared_ptr<net::Peer>& peer) const;
  void take(const std::string& from, net::Message message);
  References::List receive_references(const std::vector<WireReference>& wires, const std::string& from);
  void on_reference(const std::string& from, Reader& in);
  void on_context_message(const std::string& from, Reader& in);
  void count_received(const std::string& caller);
  void end_worker(const std::shared_ptr<net::Peer>& peer, const std::string& why);
  void end_calls();
  void drop_unanswered();

  AgentCore core_;
  EarlyEvents early_events_;  // guarded by the mutex of CallTables
  MessageSender sender_;
  CallClient client_;
  CallServer server_;
  AgentMembers members_;
  AgentShutdown shutdown_;
};

}  // namespace cohort::rpc
