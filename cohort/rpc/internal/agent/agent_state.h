#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/base/threads/keyed_async_mutex.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/net/node.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/call_context.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/early_events.h"
#include "cohort/rpc/internal/agent/handler_threads.h"
#include "cohort/rpc/internal/agent/pending_calls.h"
#include "cohort/rpc/internal/agent/running_calls.h"
#include "cohort/rpc/internal/agent/shutdown_state.h"
#include "cohort/rpc/internal/agent/worker_table.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_scope.h"
#include "cohort/rpc/internal/contexts.h"
#include "cohort/rpc/internal/references.h"
#include "cohort/rpc/internal/telemetry/call_statistics.h"
#include "cohort/rpc/internal/telemetry/call_trace.h"
#include "cohort/rpc/internal/timers.h"
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

  Contexts& contexts() { return contexts_; }
  /// Forgets a context here, and has those forget it that were called in it.
  void end_context(ContextId id);
  /// The agent whose handler this thread runs; null outside of handlers.
  static AgentState* of_handler();
  /// The gradients of the arguments of a call that this agent answered, for those of its results: within a handler.
  Encoded backward_part(const Encoded& arguments);

  const WorkerInfo& self() const { return self_; }
  std::vector<WorkerInfo> workers() const;
  /// The same target, by the worker's name. Throws: UsageError for an unknown id.
  Target with_name(Target target) const;
  AgentMetrics metrics() const;
  std::shared_ptr<std::byte> allocate_shared(std::size_t num_bytes) const {
    return node_->allocate_shared(num_bytes);
  }

  void send_reference_message(std::int32_t to, const ReferenceMessage& message) override;
  WorkerInfo worker(std::int32_t id) const override;
  std::chrono::milliseconds timeout() const override { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  bool is_recording() const override;
  void free_later(std::shared_ptr<void> what) override;

 private:
  using RunningKey = RunningCalls::Key;
  struct Job {
    RunningKey key;
    std::string function;
    CallContext call;
    std::shared_ptr<Reference> result;                          // null: the caller gets it
    std::optional<RecordedPlace> place;                         // within a context of distributed autograd
    ContextProtocol::CopyId copy = ContextProtocol::kNoCopy;    // of this context, in which the handler runs
    CallerState state;                                          // of the thread that made the call
    std::optional<std::string> channel;                         // of calls that have an order
    std::shared_ptr<base::KeyedAsyncMutex::Lock> channel_lock;  // from start() on
  };
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
  void on_call(const std::string& caller, std::uint64_t id, Reader& in, std::shared_ptr<void> credit);
  void on_make(const std::string& caller, std::uint64_t id, Reader& in, std::shared_ptr<void> credit);
  void begin(Job job, std::int64_t nanoseconds_left, Encoded arguments, std::shared_ptr<void> credit);
  void start(const Job& job, Encoded arguments, std::shared_ptr<void> credit);
  bool may_run_here(const std::string& function) const;
  void run_here(const Job& job, Encoded arguments);
  void run_on_pool(const Job& job, Encoded arguments, std::shared_ptr<void> credit);
  base::WaitHelper helper_of(const std::string& worker);
  void run(const Job& job, Encoded arguments);
  void fail_job(const Job& job, const std::exception_ptr& error);
  void expire_object(const Job& job);
  void run_fetch(const Job& job, const Encoded& arguments, const RemoteFunction& function);
  void run_in_context(const Job& job, Encoded arguments, const RemoteFunction& function);
  SendGradients gradient_sender(const std::string& worker, std::uint64_t id,
                                const std::weak_ptr<ContextState>& context);
  base::Future<Encoded> send_gradients(const std::string& worker, std::uint64_t id,
                                       const std::shared_ptr<ContextState>& context,
                                       const std::vector<at::Tensor>& gradients);
  std::int32_t id_of(const std::string& worker) const;
  References::List receive_references(const std::vector<WireReference>& wires, const std::string& from);
  void on_reference(const std::string& from, Reader& in);
  void on_context_message(const std::string& from, Reader& in);
  void apply(Contexts::Effects effects);
  ContextProtocol::CopyId count_in_context(const std::string& caller,
                                           const std::optional<RecordedPlace>& place);
  void keep(const Job& job, ObjectValue value, const std::exception_ptr& error);
  void check_answer(const std::string& from, std::uint64_t id) const;
  void on_error(std::uint64_t id, const RemoteException& exception);
  bool on_cancel(const RunningKey& key);
  void on_cancel_message(const RunningKey& key);
  void on_leaving(const std::string& worker, std::optional<IdleReport> report);
  void answer(const RunningKey& key, Encoded result, std::exception_ptr error,
              std::optional<bool> is_late = std::nullopt);
  std::optional<std::stop_source> end(const RunningKey& key);
  void finish(std::uint64_t id, Encoded result, const std::exception_ptr& error);
  void fail(std::uint64_t id, const std::exception_ptr& error) { finish(id, {}, error); }
  void expire(std::uint64_t id);
  void send(const std::string& worker, Encoded message, const std::optional<std::string>& channel = {});
  void send_or_fail(const std::string& worker, Encoded message, const std::optional<std::string>& channel,
                    const std::function<void(std::exception_ptr)>& on_error);
  void send_when_resolved(const std::string& worker, Encoded message,
                          std::function<void(std::exception_ptr)> on_error,
                          std::function<bool()> is_wanted = nullptr,
                          const std::optional<std::string>& channel = {});
  void attach(PendingCall& call, Encoded& result);
  void leave(base::Deadline deadline);
  void count_unsent(const std::string& worker, const std::optional<ContextCall>& in_context);
  void count_received(const std::string& caller);
  std::optional<IdleReport> next_report();
  void send_leaving(const std::optional<IdleReport>& report);
  std::string missing_at_shutdown() const;

  const WorkerInfo self_;
  const AgentOptions options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::unique_ptr<base::ThreadPool> pool_;
  std::unique_ptr<Timers> timers_;
  std::unique_ptr<net::Node> node_;  // from join() on
  std::shared_ptr<References> references_;
  Contexts contexts_;
  // By worker and channel: messages that are sent, and handlers that run.
  const std::shared_ptr<base::KeyedAsyncMutex> sends_ = std::make_shared<base::KeyedAsyncMutex>(),
                                               handlers_ = std::make_shared<base::KeyedAsyncMutex>();
  CallTrace trace_;
  HandlerThreads threads_;

  // Of all below, together: shutdown() asks whether no call is under way, and what was counted. So whoever adds a call to
  // pending_ or running_, or takes one out, counts it before it unlocks the mutex.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  WorkerTable workers_;
  EarlyEvents early_events_;
  PendingCalls pending_;
  RunningCalls running_;
  ShutdownState shutdown_;
  CallStatistics statistics_;
};

}  // namespace cohort::rpc
