#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/message_sender.h"
#include "cohort/rpc/internal/agent/pending_calls.h"
#include "cohort/rpc/internal/context_scope.h"
#include "cohort/rpc/internal/context_state.h"
#include "cohort/rpc/internal/gradient_nodes.h"
#include "cohort/rpc/internal/telemetry/call_trace.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {

/// Makes the calls of an agent, and ends each by its answer, its deadline, or the end of its worker. Threads:
/// any, without the mutex of CallTables.
class CallClient {
 public:
  CallClient(AgentCore& core, MessageSender& sender) : core_(core), sender_(sender), trace_(core.self.name) {}

  /// Calls a function. The call of a thread that goes backward ends where that backward fails.
  /// Throws: UsageError for an unknown worker or function, and after the agent has stopped.
  base::Future<Encoded> call(const Target& target, const char* function, Encoded arguments);
  /// Asks for an object, which is lost where the thread goes backward and that backward has failed.
  /// `asked_at`: the line of the program that asks. Throws: as call().
  std::shared_ptr<Reference> make(const Target& target, const char* function, Encoded arguments,
                                  const std::string& asked_at);

  /// Throws: CommError where the call is another worker's to answer.
  void check_answer(const std::string& from, std::uint64_t id) const;
  /// The call has its answer, and its future gets the result once the owners of its references know of them.
  void on_result(std::uint64_t id, Encoded result, const References::List& references);
  void on_error(std::uint64_t id, const RemoteException& exception);
  /// Ends a call with an error. Does nothing where it has ended.
  void fail(std::uint64_t id, const std::exception_ptr& error) { finish(id, {}, error); }

 private:
  struct BegunCall {
    std::uint64_t id;
    base::Future<Encoded> result;
  };
  BegunCall begin(const Target& target, const char* function, Encoded arguments);
  std::shared_ptr<Reference> make_lost(const std::string& worker, std::string made_at,
                                       std::exception_ptr error);
  base::WaitHelper helper_of(const std::string& worker);
  std::shared_ptr<RecordedCall> record(ContextScope& scope, const ContextCall& in_context, Encoded& arguments,
                                       Callee callee, std::optional<RecordedPlace>& place);
  void count_unsent(const std::string& worker);
  void forget(const std::optional<ContextCall>& in_context, const std::shared_ptr<RecordedCall>& recorded);
  Callee callee_of_object(const std::string& worker, std::uint64_t id,
                          const std::weak_ptr<ContextState>& context,
                          std::shared_ptr<const std::atomic<bool>> is_used);
  bool is_gone(const std::string& worker) const;
  void finish(std::uint64_t id, Encoded result, const std::exception_ptr& error);
  static void attach(PendingCall& call, Encoded& result);
  void expire(std::uint64_t id);
  void give_up(std::uint64_t id, const std::exception_ptr& error);
  BackwardFailures::OnFailure giving_up(std::uint64_t id);
  std::function<base::Future<void>()> answer_or_failure(const std::string& worker,
                                                        const base::Future<void>& answer,
                                                        const std::weak_ptr<ContextState>& context);
  SendGradients gradient_sender(const std::string& worker, std::uint64_t id,
                                const std::weak_ptr<ContextState>& context);
  base::Future<Encoded> send_gradients(const std::string& worker, std::uint64_t id,
                                       const std::shared_ptr<ContextState>& context,
                                       const std::vector<at::Tensor>& gradients);

  AgentCore& core_;
  CallTables& tables_ = core_.tables;
  MessageSender& sender_;
  CallTrace trace_;
};

}  // namespace cohort::rpc
