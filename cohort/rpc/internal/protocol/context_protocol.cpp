#include "cohort/rpc/internal/protocol/context_protocol.h"

#include <algorithm>

namespace cohort::rpc {
namespace {

// Contexts that have ended are remembered, so that a call which was on its way does not make one anew.
constexpr std::size_t kMaxEnded = 256;

}  // namespace

ContextProtocol::CopyId ContextProtocol::add_copy(ContextId context) {
  const CopyId copy = next_copy_++;
  entries_[context].copy = copy;
  copies_.emplace(copy, context);
  return copy;
}

ContextId ContextProtocol::create() {
  const ContextId context{self_, next_context_++};
  add_copy(context);
  return context;
}

ContextProtocol::CopyId ContextProtocol::copy_of(ContextId context) const {
  const auto found = entries_.find(context);
  return found != entries_.end() ? found->second.copy : kNoCopy;
}

ContextProtocol::CopyId ContextProtocol::on_call(std::int32_t /*caller*/, ContextId context) {
  if (const CopyId copy = copy_of(context); copy != kNoCopy) return copy;
  if (down_.count(context.creator) > 0) return kNoCopy;
  if (std::find(ended_.begin(), ended_.end(), context) != ended_.end()) return kNoCopy;
  return add_copy(context);
}

bool ContextProtocol::begin_call(CopyId copy, std::int32_t callee) {
  const auto found = copies_.find(copy);
  if (found == copies_.end()) return false;
  entries_.at(found->second).callees.insert(callee);
  return true;
}

void ContextProtocol::end(ContextId context, Effects& effects) {
  if (std::find(ended_.begin(), ended_.end(), context) == ended_.end()) ended_.push_back(context);
  if (ended_.size() > kMaxEnded) ended_.pop_front();
  const auto found = entries_.extract(context);
  if (found.empty()) return;
  copies_.erase(found.mapped().copy);
  effects.ended.push_back(found.mapped().copy);
  for (const std::int32_t callee : found.mapped().callees) {
    effects.messages.emplace_back(callee, ContextMessage{context});
  }
}

void ContextProtocol::on_message(std::int32_t /*from*/, const ContextMessage& message, Effects& effects) {
  end(message.context, effects);
}

void ContextProtocol::on_down(std::int32_t worker, Effects& effects) {
  down_.insert(worker);
  for (auto at = entries_.begin(); at != entries_.end();) {
    if (at->first.creator != worker) {
      ++at;
      continue;
    }
    copies_.erase(at->second.copy);
    effects.ended.push_back(at->second.copy);
    at = entries_.erase(at);
  }
}

}  // namespace cohort::rpc
