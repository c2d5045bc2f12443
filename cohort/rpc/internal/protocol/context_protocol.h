#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cohort/rpc/context_id.h"

/// The protocol of contexts: which workers have a copy of a context, and how all of them learn of its end. No tensor, thread,
/// clock or socket, so a test runs it with messages in any order.
namespace cohort::rpc {

using dist_autograd::ContextId;

/// The sender's copy of a context has ended.
struct ContextMessage {
  ContextId context;
};

/// One worker's part of the protocol. A worker has a copy of a context from the first call of it on. The end of the context
/// goes to those who were called in it, and on to those that they called. Threads: one at a time.
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
  /// A call has come. Returns the copy in which it runs; kNoCopy where the context has ended.
  CopyId on_call(std::int32_t caller, ContextId context);
  /// Before a call of `callee` is sent within a copy. False where the copy has ended: the call belongs to no context.
  bool begin_call(CopyId copy, std::int32_t callee);

  void on_message(std::int32_t from, const ContextMessage& message, Effects& effects);
  /// A worker is dead.
  void on_down(std::int32_t worker, Effects& effects);

  /// kNoCopy where there is none.
  CopyId copy_of(ContextId context) const;
  bool is_live(CopyId copy) const { return copies_.count(copy) > 0; }
  std::size_t num_copies() const { return copies_.size(); }
  /// All that is kept: copies, and what is known of contexts that have ended.
  std::size_t size() const { return copies_.size() + ended_.size(); }

 private:
  struct Entry {
    CopyId copy = kNoCopy;
    std::set<std::int32_t> callees;
  };
  CopyId add_copy(ContextId context);

  const std::int32_t self_;
  std::uint64_t next_context_ = 1, next_copy_ = 1;
  std::map<ContextId, Entry> entries_;
  std::map<CopyId, ContextId> copies_;
  // For calls that come after the end: contexts of late, and workers that are dead.
  std::deque<ContextId> ended_;
  std::set<std::int32_t> down_;
};

}  // namespace cohort::rpc
