// The end of a context travels as calls do: each copy tells those whom it called, with the number of its
// calls. So a callee knows which calls have yet to come, in whatever order messages arrive. For each caller
// it has a balance: calls that have come, less calls that ends have counted. It forgets a context that has
// ended when all balances are 0.
//
// Always: a worker's calls and ends add up to 0 for each callee in the end. So a balance that is not 0 has a
// message to come, or its caller dies. Nothing is remembered for longer, and no number bounds it.
//
// A call that comes when its context is forgotten, or not known yet, makes a copy. The end of its caller is
// still to come, as the balance is above 0, and ends this copy too. By induction over the time at which
// copies were made each copy ends: its maker's copy is older. If the maker dies the worker asks the creator
// to tell it of the end (kOrphaned). A copy does not end with its caller: leaves here may have gradients that
// an optimizer has yet to take. The creator itself knows which of its contexts have ended, so no call makes a
// copy there.
//
// A worker may lose the creator, and its callees keep it. Then its copy ends, and its callees learn of their
// calls' number (kAbandoned). Their copies live on: the creator may use them yet. So each asks the creator,
// as if the caller had died.
//
// A call is counted when it begins, and not when it is sent: its context may end while its references are
// resolved. If it then is not sent (kUnsent) the end has counted a call too many. kUnsent counts as the call
// itself.
#include "cohort/rpc/internal/protocol/context_protocol.h"

namespace cohort::rpc {

using ContextMessageType = ContextMessage::Type;

ContextProtocol::CopyId ContextProtocol::add_copy(KnownContexts::iterator entry) {
  entry->second.copy = next_copy_++;
  copies_.emplace(entry->second.copy, entry);
  return entry->second.copy;
}

ContextId ContextProtocol::create() {
  const ContextId context{self_, next_context_++};
  add_copy(contexts_.try_emplace(context).first);
  return context;
}

ContextProtocol::CopyId ContextProtocol::copy_of(ContextId context) const {
  const auto found = contexts_.find(context);
  return found != contexts_.end() ? found->second.copy : kNoCopy;
}

// An entry that has no copy is of a context that has ended.
ContextProtocol::KnownContexts::iterator ContextProtocol::find_or_add(ContextId context) {
  const auto [entry, is_new] = contexts_.try_emplace(context);
  if (is_new && context.creator != self_) add_copy(entry);
  return entry;
}

ContextProtocol::CopyId ContextProtocol::on_call(std::int32_t caller, ContextId context) {
  if (down_.count(context.creator) > 0 || down_.count(caller) > 0) return copy_of(context);
  const auto entry = find_or_add(context);
  const CopyId copy = entry->second.copy;
  add_to_balance(entry, caller, 1);
  return copy;
}

bool ContextProtocol::begin_call(CopyId copy, std::int32_t callee) {
  const auto found = copies_.find(copy);
  if (found == copies_.end()) return false;
  if (down_.count(callee) == 0) ++found->second->second.made[callee];
  return true;
}

void ContextProtocol::cancel_call(CopyId copy, ContextId context, std::int32_t callee, Effects& effects) {
  if (down_.count(callee) > 0) return;
  if (const auto found = copies_.find(copy); found != copies_.end()) {
    --found->second->second.made[callee];
  } else {  // also where this worker has lost the creator: the callee may have it
    effects.messages.emplace_back(callee, ContextMessage{ContextMessageType::kUnsent, context});
  }
}

void ContextProtocol::end(ContextId context, Effects& effects) {
  const auto entry = contexts_.find(context);
  if (entry == contexts_.end()) return;
  end_copy(entry, ContextMessageType::kEnded, effects);
  erase_if_over(entry);
}

// Tells those that the copy has called.
void ContextProtocol::end_copy(KnownContexts::iterator entry, ContextMessageType why, Effects& effects) {
  auto& [context, known] = *entry;
  if (known.copy == kNoCopy) return;
  effects.ended.push_back(known.copy);
  copies_.erase(known.copy);
  known.copy = kNoCopy;
  for (const auto& [callee, num_calls] : known.made) {
    effects.messages.emplace_back(callee, ContextMessage{why, context, num_calls});
  }
  known.made.clear();
}

void ContextProtocol::add_to_balance(KnownContexts::iterator entry, std::int32_t caller,
                                     std::uint64_t change) {
  Counts& balances = entry->second.balances;
  if ((balances[caller] += change) == 0) balances.erase(caller);
  erase_if_over(entry);
}

void ContextProtocol::erase_if_over(KnownContexts::iterator entry) {
  if (entry->second.copy == kNoCopy && entry->second.balances.empty()) contexts_.erase(entry);
}

void ContextProtocol::on_message(std::int32_t from, const ContextMessage& message, Effects& effects) {
  if (down_.count(from) > 0 || down_.count(message.context.creator) > 0) return;
  switch (message.type) {
    case ContextMessageType::kEnded: {
      const auto entry = contexts_.try_emplace(message.context).first;
      end_copy(entry, ContextMessageType::kEnded, effects);
      return add_to_balance(entry, from, 0 - message.num_calls);
    }
    case ContextMessageType::kAbandoned: {
      const auto entry = find_or_add(message.context);
      ask_creator(entry, effects);
      return add_to_balance(entry, from, 0 - message.num_calls);
    }
    case ContextMessageType::kUnsent:
      return add_to_balance(find_or_add(message.context), from, 1);
    case ContextMessageType::kOrphaned: {
      if (const auto found = copies_.find(copy_of(message.context)); found != copies_.end()) {
        found->second->second.made.try_emplace(from, 0);
      } else {
        effects.messages.emplace_back(from, ContextMessage{ContextMessageType::kEnded, message.context});
      }
      return;
    }
  }
}

// Has it tell this worker of the end.
void ContextProtocol::ask_creator(KnownContexts::iterator entry, Effects& effects) const {
  const auto& [context, known] = *entry;
  if (known.copy == kNoCopy || context.creator == self_) return;
  effects.messages.emplace_back(context.creator, ContextMessage{ContextMessageType::kOrphaned, context});
}

void ContextProtocol::on_down(std::int32_t worker, Effects& effects) {
  if (!down_.insert(worker).second) return;
  for (auto next = contexts_.begin(); next != contexts_.end();) {
    const auto entry = next++;
    if (entry->first.creator != worker) {
      remove_worker(entry, worker, effects);
      continue;
    }
    entry->second.made.erase(worker);
    end_copy(entry, ContextMessageType::kAbandoned, effects);
    contexts_.erase(entry);
  }
}

void ContextProtocol::remove_worker(KnownContexts::iterator entry, std::int32_t worker, Effects& effects) {
  KnownContext& known = entry->second;
  known.made.erase(worker);
  if (known.balances.erase(worker) == 0) return;
  // Also where there are other callers: these may have been called by this worker.
  ask_creator(entry, effects);
  erase_if_over(entry);
}

}  // namespace cohort::rpc
