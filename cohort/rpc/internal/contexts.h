#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "cohort/rpc/internal/context_state.h"

namespace cohort::rpc {

/// The contexts of a worker. Threads: any.
class Contexts {
 public:
  explicit Contexts(std::int32_t self) : self_(self) {}
  std::shared_ptr<ContextState> create();
  /// For a call that came. Of a context that has ended nothing is kept.
  std::shared_ptr<ContextState> find_or_make(ContextId id);
  /// Throws: UsageError for one that is not here, or has ended.
  std::shared_ptr<ContextState> find(ContextId id) const;
  /// The same; null, where find() throws.
  std::shared_ptr<ContextState> find_if_here(ContextId id) const;
  /// Forgets it, and sets `callees` to those whom this worker has called in it, who are to forget theirs. Returns what is left
  /// of it, graphs and tensors, for whoever may take the time to free them.
  std::shared_ptr<void> end(ContextId id, std::set<std::string>& callees);
  /// The contexts of a worker that is dead, likewise.
  std::shared_ptr<void> on_down(std::int32_t worker);
  std::size_t size() const;
  /// ContextState::num_running() of all.
  std::size_t num_backwards() const;
  const void* mark() const { return mark_.get(); }

 private:
  const std::int32_t self_;
  const std::shared_ptr<const void> mark_ = std::make_shared<char>();
  mutable std::mutex mutex_;  // of all below
  std::uint64_t next_number_ = 1;
  std::map<ContextId, std::shared_ptr<ContextState>> contexts_;
  // For calls that come after the end: contexts of late, and workers that are dead.
  std::deque<ContextId> ended_;
  std::set<std::int32_t> down_;
};

}  // namespace cohort::rpc
