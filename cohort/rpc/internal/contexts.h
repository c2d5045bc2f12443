#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/rpc/internal/context_state.h"
#include "cohort/rpc/internal/protocol/context_protocol.h"

namespace cohort::rpc {

/// A call that this worker makes within a context.
struct ContextCall {
  ContextProtocol::CopyId copy;
  ContextId context;
  std::int32_t callee;
};

/// The contexts of a worker: what ContextProtocol has copies of. Threads: any.
class Contexts {
 public:
  using CopyId = ContextProtocol::CopyId;
  /// What the end of contexts leads to.
  struct Effects {
    std::vector<std::pair<std::int32_t, ContextMessage>> messages;  ///< to send
    std::shared_ptr<void> left;  ///< graphs and tensors, for whoever may take the time to free them
  };

  explicit Contexts(std::int32_t self) : protocol_(self) {}
  std::shared_ptr<ContextState> create();
  /// A call has come, whether its handler will run or not: ContextProtocol::on_call().
  CopyId on_call(std::int32_t caller, ContextId id);
  /// The context in which such a call runs. If the copy has ended the context has ended too, and nothing is
  /// kept of it.
  std::shared_ptr<ContextState> get(CopyId copy, ContextId id);
  /// Before a call is recorded. Nothing, where the context has ended: the call is not recorded.
  std::optional<ContextCall> begin_call(const ContextState& context, std::int32_t callee);
  /// A call that began will never be sent.
  Effects cancel_call(const ContextCall& call);
  /// Throws: UsageError for a context that is not here, or has ended.
  std::shared_ptr<ContextState> find(ContextId id) const;
  /// The same; null, where find() throws.
  std::shared_ptr<ContextState> find_if_here(ContextId id) const;
  /// The program of this worker has ended a context of its own.
  Effects end(ContextId id);
  Effects on_message(std::int32_t from, const ContextMessage& message);
  Effects on_down(std::int32_t worker);
  /// Also those that have ended and of which calls have yet to come.
  std::size_t size() const;
  /// ContextState::num_running() of all.
  std::size_t num_backwards() const;
  const void* mark() const { return mark_.get(); }

 private:
  std::shared_ptr<ContextState> state_of(CopyId copy, ContextId id);
  Effects take_effects(ContextProtocol::Effects effects);

  const std::shared_ptr<const void> mark_ = std::make_shared<char>();
  mutable std::mutex mutex_;  // of all below
  ContextProtocol protocol_;
  std::map<CopyId, std::shared_ptr<ContextState>> states_;  // from the first handler on
};

}  // namespace cohort::rpc
