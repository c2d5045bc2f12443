#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cohort/rpc/context_id.h"

/// The protocol of contexts: which workers have a copy of a context, and how all of them learn of its end. No
/// tensor, thread, clock or socket, so a test runs it with messages in any order.
namespace cohort::rpc {

using dist_autograd::ContextId;

struct ContextMessage {
  enum class Type : std::uint8_t {
    kEnded,   ///< the sender's copy has ended. It has made `num_calls` calls of the receiver
    kUnsent,  ///< after kEnded or kAbandoned: a call that it counted will never be sent
    kOrphaned,  ///< to the creator: a caller of the sender has died, so the creator is to tell the sender of the end
    kAbandoned,  ///< the sender's copy has ended as with kEnded, but only since the sender has lost the creator
  };
  Type type = Type::kEnded;
  ContextId context;
  std::uint64_t num_calls = 0;
};

/// One worker's part of the protocol. A worker has a copy of a context from the first call of it on. The end
/// of the context goes to those who were called in it, and on to those that they called. A worker knows of a
/// context that has ended until all calls of it have come. Threads: one at a time.
class ContextProtocol {
 public:
  /// A copy of this worker's. A context that comes again has another copy.
  using CopyId = std::uint64_t;
  static constexpr CopyId kNoCopy = 0;
  /// What a step leads to. Messages may arrive in any order, also at this worker.
  struct Effects {
    std::vector<std::pair<std::int32_t, ContextMessage>> messages;
    std::vector<CopyId> ended;  ///< of this worker: what they hold can be freed
  };

  explicit ContextProtocol(std::int32_t self) : self_(self) {}

  /// A new context of this worker's.
  ContextId create();
  /// The program of this worker has ended a context of its own.
  void end(ContextId context, Effects& effects);
  /// A call has come, whether its handler will run or not. Returns the copy in which it runs; kNoCopy where
  /// the context has ended.
  CopyId on_call(std::int32_t caller, ContextId context);
  /// Before a call of `callee` is sent within a copy. False where the copy has ended: the call belongs to no
  /// context.
  bool begin_call(CopyId copy, std::int32_t callee);
  /// A call that began will never be sent.
  void cancel_call(CopyId copy, ContextId context, std::int32_t callee, Effects& effects);

  void on_message(std::int32_t from, const ContextMessage& message, Effects& effects);
  /// A worker is dead, or this worker and it have given each other up: others may still have it. What comes
  /// of it later changes nothing.
  void on_down(std::int32_t worker, Effects& effects);

  /// kNoCopy where there is none.
  CopyId copy_of(ContextId context) const;
  bool is_live(CopyId copy) const { return copies_.count(copy) > 0; }
  std::size_t num_copies() const { return copies_.size(); }
  /// Contexts that this worker has a copy of, or that have ended and of which calls or ends have yet to come.
  std::size_t size() const { return contexts_.size(); }

 private:
  // Calls by worker. Differences may wrap around.
  using Counts = std::map<std::int32_t, std::uint64_t>;
  struct KnownContext {
    CopyId copy = kNoCopy;  // none: the context has ended
    Counts made;            // calls of the copy, of each callee that is to be told of the end
    Counts balances;        // of each caller: calls that have come, less those that its ends counted. Never 0
  };
  using KnownContexts = std::map<ContextId, KnownContext>;
  CopyId add_copy(KnownContexts::iterator entry);
  void end_copy(KnownContexts::iterator entry, ContextMessage::Type why, Effects& effects);
  KnownContexts::iterator find_or_add(ContextId context);
  void ask_creator(KnownContexts::iterator entry, Effects& effects) const;
  void add_to_balance(KnownContexts::iterator entry, std::int32_t caller, std::uint64_t change);
  void remove_worker(KnownContexts::iterator entry, std::int32_t worker, Effects& effects);
  void erase_if_over(KnownContexts::iterator entry);

  const std::int32_t self_;
  std::uint64_t next_context_ = 1, next_copy_ = 1;
  KnownContexts contexts_;
  std::map<CopyId, KnownContexts::iterator> copies_;
  std::set<std::int32_t> down_;
};

}  // namespace cohort::rpc
