#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "cohort/rpc/call_context.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/handler_threads.h"
#include "cohort/rpc/internal/agent/message_sender.h"
#include "cohort/rpc/internal/agent/running_calls.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_scope.h"
#include "cohort/rpc/internal/keyed_async_mutex.h"

namespace cohort::rpc {

/// Answers the calls of workers: where and when their handlers run, and what becomes of results. Threads:
/// any, without the mutex of CallTables.
class CallServer {
 public:
  using Key = RunningCalls::Key;
  CallServer(AgentCore& core, MessageSender& sender) : core_(core), sender_(sender) {}

  /// A message of the caller has come that asks for a result. `credit` is its room in the caller's window.
  void on_call(const std::string& caller, std::uint64_t id, Reader& in, std::shared_ptr<void> credit);
  /// The same for one that asks for an object.
  void on_make(const std::string& caller, std::uint64_t id, Reader& in, std::shared_ptr<void> credit);
  /// The caller has given up a call, which may have yet to come.
  void on_cancel(const Key& key, std::uint64_t sequence, const RemoteException& why);
  /// Drops a call, and asks its handler to stop. False where no such call runs.
  bool cancel(const Key& key, const RemoteException& why);
  /// At the end of the agent: handlers that wait for their channel do not begin, nor those that come.
  void stop() { channels_->clear(); }

  const HandlerThreads& threads() const { return threads_; }

 private:
  struct Job {
    Key key;
    std::string function;
    CallContext call;
    std::shared_ptr<Reference> result;                        // null: the caller gets it
    std::optional<RecordedPlace> place;                       // within a context of distributed autograd
    ContextProtocol::CopyId copy = ContextProtocol::kNoCopy;  // of this context, in which the handler runs
    CallerState state;                                        // of the thread that made the call
    std::optional<std::string> channel;                       // of calls that have an order
    bool is_cancelled = false;                                // before it came
    std::shared_ptr<KeyedAsyncMutex::Lock> channel_lock;      // from start() on
    std::shared_ptr<HandlerThreads::Queued> queued;           // where it waits before it begins
    std::shared_ptr<WaitingArguments> arguments;              // until it begins
    std::shared_ptr<const RemoteException> why_cancelled;     // RunningCalls::RunningCall; under the mutex
  };

  struct BackwardCall;
  ContextProtocol::CopyId count_in_context(const std::string& caller,
                                           const std::optional<RecordedPlace>& place);
  void begin(Job job, std::int64_t nanoseconds_left, Encoded arguments, std::shared_ptr<void> credit);
  void skip(const Job& job);
  void start(const Job& job);
  Job queue(Job job);
  bool may_run_here(const std::string& function) const;
  void run_here(const Job& job);
  void run_on_pool(const Job& job);
  void run(const Job& job);
  void run_backward(const Job& job, const BackwardCall& asked);
  Encoded backward_part(const std::string& caller, const BackwardCall& asked) const;
  bool waits_for_maker(const Job& job, const Encoded& arguments);
  void run_fetch(const Job& job, const Encoded& arguments, const RemoteFunction& function);
  void run_in_context(const Job& job, Encoded arguments, const RemoteFunction& function);
  void fail_job(const Job& job, const std::exception_ptr& error);
  void expire_object(const Job& job);
  void keep(const Job& job, ObjectValue value, const std::exception_ptr& error);
  void answer(const Key& key, Encoded result, std::exception_ptr error,
              std::optional<bool> is_late = std::nullopt);
  std::optional<RunningCalls::RunningCall> end(const Key& key);

  AgentCore& core_;
  CallTables& tables_ = core_.tables;
  MessageSender& sender_;
  // Handlers that run, by worker and channel.
  const std::shared_ptr<KeyedAsyncMutex> channels_ = std::make_shared<KeyedAsyncMutex>();
  HandlerThreads threads_;
};

}  // namespace cohort::rpc
