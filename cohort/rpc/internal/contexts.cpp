// ContextProtocol decides which contexts have a copy here, and `states_` has what was computed in each
// copy. A step of the protocol and the change of `states_` that follows are under one mutex. So no copy
// that has ended has a state. The caller of a step frees states without the mutex, as their graphs may be
// large.
#include "cohort/rpc/internal/contexts.h"

#include "cohort/base/error.h"

namespace cohort::rpc {

// Under the mutex.
std::shared_ptr<ContextState> Contexts::state_of(CopyId copy, ContextId id) {
  std::shared_ptr<ContextState>& state = states_[copy];
  if (state == nullptr) state = std::make_shared<ContextState>(id, copy, mark_);
  return state;
}

// Under the mutex.
Contexts::Effects Contexts::take_effects(ContextProtocol::Effects effects) {
  const auto left = std::make_shared<std::vector<std::shared_ptr<ContextState>>>();
  for (const CopyId copy : effects.ended) {
    const auto ended = states_.extract(copy);
    if (ended.empty()) continue;
    ended.mapped()->end();
    left->push_back(std::move(ended.mapped()));
  }
  return {std::move(effects.messages), left->empty() ? nullptr : left};
}

std::shared_ptr<ContextState> Contexts::create() {
  const std::lock_guard lock(mutex_);
  const ContextId id = protocol_.create();
  return state_of(protocol_.copy_of(id), id);
}
Contexts::CopyId Contexts::on_call(std::int32_t caller, ContextId id) {
  const std::lock_guard lock(mutex_);
  return protocol_.on_call(caller, id);
}
std::shared_ptr<ContextState> Contexts::get(CopyId copy, ContextId id) {
  const std::lock_guard lock(mutex_);
  if (protocol_.is_live(copy)) return state_of(copy, id);
  // The handler runs all the same, with a state that nobody else finds and that goes with it.
  const auto ended = std::make_shared<ContextState>(id, copy, mark_);
  ended->end();
  return ended;
}
std::optional<ContextCall> Contexts::begin_call(const ContextState& context, std::int32_t callee) {
  const std::lock_guard lock(mutex_);
  if (!protocol_.begin_call(context.copy(), callee)) return std::nullopt;
  return ContextCall{context.copy(), context.id(), callee};
}
Contexts::Effects Contexts::cancel_call(const ContextCall& call) {
  const std::lock_guard lock(mutex_);
  ContextProtocol::Effects effects;
  protocol_.cancel_call(call.copy, call.context, call.callee, effects);
  return take_effects(std::move(effects));
}
std::shared_ptr<ContextState> Contexts::find_if_here(ContextId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find(protocol_.copy_of(id));
  return found != states_.end() ? found->second : nullptr;
}
std::shared_ptr<ContextState> Contexts::find(ContextId id) const {
  if (std::shared_ptr<ContextState> found = find_if_here(id)) return found;
  throw UsageError("rpc.context", base::concat("context ", id.number, " of worker ", id.creator,
                                               " has ended, or no call of it came here"));
}
Contexts::Effects Contexts::end(ContextId id) {
  const std::lock_guard lock(mutex_);
  ContextProtocol::Effects effects;
  protocol_.end(id, effects);
  return take_effects(std::move(effects));
}
Contexts::Effects Contexts::on_message(std::int32_t from, const ContextMessage& message) {
  const std::lock_guard lock(mutex_);
  ContextProtocol::Effects effects;
  protocol_.on_message(from, message, effects);
  return take_effects(std::move(effects));
}
Contexts::Effects Contexts::on_down(std::int32_t worker) {
  const std::lock_guard lock(mutex_);
  ContextProtocol::Effects effects;
  protocol_.on_down(worker, effects);
  return take_effects(std::move(effects));
}
std::size_t Contexts::size() const {
  const std::lock_guard lock(mutex_);
  return protocol_.size();
}
std::size_t Contexts::num_backwards() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [copy, context] : states_) sum += static_cast<std::size_t>(context->num_running());
  return sum;
}

}  // namespace cohort::rpc
