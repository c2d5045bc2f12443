// A new holder asks the owner itself: kFork. The owner confirms it, or says that the object is gone; then the
// holder tells whoever passed it on: kAccepted. So whoever dies takes only forks of its own along:
//   the new holder dies: its parent and the owner see it, and forget the fork;
//   the parent dies first: the owner may free the object before kFork comes, and answers kGone;
//   the owner dies: all holds on its objects are lost.
// The owner makes forks for others at once, without messages. A worker is its own peer: what it tells itself
// is delivered before a step ends. kDrop follows only a fork that is confirmed, so the order of messages does
// not matter.
#include "cohort/rpc/internal/protocol/reference_protocol.h"

#include <algorithm>

namespace cohort::rpc {

using MessageType = ReferenceMessage::Type;

ReferenceProtocol::HoldId ReferenceProtocol::add(Hold hold) {
  const HoldId id = next_number_++;
  hold_of_fork_[hold.reference.fork] = id;
  holds_.emplace(id, std::move(hold));
  return id;
}

ReferenceProtocol::HoldId ReferenceProtocol::create(std::int32_t owner) {
  const ObjectId object{self_, next_number_++};
  return add({.reference = {object, owner, new_fork()},
              .state = down_.count(owner) > 0 ? State::kLost : State::kWaiting});
}

ReferenceProtocol::HoldId ReferenceProtocol::create_here() {
  const WireReference reference{{self_, next_number_++}, self_, new_fork()};
  objects_[reference.object][reference.fork] = self_;
  return add({.reference = reference, .state = State::kConfirmed});
}

ReferenceProtocol::HoldId ReferenceProtocol::make(const WireReference& asked, std::int32_t holder,
                                                  Effects& effects) {
  const ForkId own = new_fork();
  objects_[asked.object][own] = self_;
  if (down_.count(holder) == 0) objects_[asked.object][asked.fork] = holder;
  emit(holder, {MessageType::kConfirmed, asked.object, asked.fork}, effects);
  return add({.reference = {asked.object, self_, own}, .state = State::kConfirmed});
}

WireReference ReferenceProtocol::describe(HoldId hold) const {
  return holds_.at(hold).reference;
}

WireReference ReferenceProtocol::send(HoldId id, std::int32_t to) {
  Hold& hold = holds_.at(id);
  WireReference reference = hold.reference;
  reference.fork = new_fork();
  if (down_.count(to) > 0) return reference;
  if (reference.owner == self_) {
    objects_.at(reference.object)[reference.fork] = to;
  } else {
    ++hold.uses;
    passed_on_[reference.fork] = {id, to};
  }
  return reference;
}

ReferenceProtocol::HoldId ReferenceProtocol::receive(const WireReference& reference, std::int32_t from,
                                                     Effects& effects) {
  const bool is_owner_down = down_.count(reference.owner) > 0;
  if (from == reference.owner && !is_owner_down)
    return add({.reference = reference, .state = State::kConfirmed});
  const HoldId id = add({.reference = reference, .parent = from});
  if (is_owner_down) {
    resolve_hold(id, State::kLost, effects);
  } else {
    emit(reference.owner, {MessageType::kFork, reference.object, reference.fork}, effects);
  }
  return id;
}

void ReferenceProtocol::release(HoldId id, Effects& effects) {
  Hold& hold = holds_.at(id);
  if (--hold.uses > 0 || hold.state == State::kWaiting) return;
  const WireReference reference = hold.reference;
  const bool is_confirmed = hold.state == State::kConfirmed;
  hold_of_fork_.erase(reference.fork);
  holds_.erase(id);
  if (is_confirmed) emit(reference.owner, {MessageType::kDrop, reference.object, reference.fork}, effects);
}

void ReferenceProtocol::resolve_hold(HoldId id, State state, Effects& effects) {
  Hold& hold = holds_.at(id);
  hold.state = state;
  effects.resolved.push_back(id);
  if (const std::int32_t parent = std::exchange(hold.parent, -1); parent != -1) {
    emit(parent, {MessageType::kAccepted, hold.reference.object, hold.reference.fork}, effects);
  }
  if (hold.uses == 0) {  // it was released while it waited
    hold.uses = 1;
    release(id, effects);
  }
}

void ReferenceProtocol::remove_fork(ObjectId object, ForkId fork, Effects& effects) {
  const auto found = objects_.find(object);
  if (found == objects_.end() || found->second.erase(fork) == 0 || !found->second.empty()) return;
  objects_.erase(found);
  effects.freed.push_back(object);
}

void ReferenceProtocol::emit(std::int32_t to, const ReferenceMessage& message, Effects& effects) {
  if (to != self_) {
    if (down_.count(to) == 0) effects.messages.emplace_back(to, message);
    return;
  }
  // A queue and no recursion: what delivery tells this worker waits its turn in the loop.
  to_self_.push_back(message);
  if (std::exchange(is_delivering_, true)) return;
  for (std::size_t i = 0; i < to_self_.size(); ++i) deliver(self_, ReferenceMessage(to_self_[i]), effects);
  to_self_.clear();
  is_delivering_ = false;
}

void ReferenceProtocol::on_message(std::int32_t from, const ReferenceMessage& message, Effects& effects) {
  if (down_.count(from) == 0) deliver(from, message, effects);
}

void ReferenceProtocol::deliver(std::int32_t from, const ReferenceMessage& message, Effects& effects) {
  switch (message.type) {
    case MessageType::kFork: {
      const auto found = objects_.find(message.object);
      if (found != objects_.end()) found->second[message.fork] = from;
      emit(from,
           {found == objects_.end() ? MessageType::kGone : MessageType::kConfirmed, message.object,
            message.fork},
           effects);
      return;
    }
    case MessageType::kConfirmed:
    case MessageType::kGone: {
      const auto found = hold_of_fork_.find(message.fork);
      if (found == hold_of_fork_.end() || holds_.at(found->second).state != State::kWaiting) return;
      return resolve_hold(found->second,
                          message.type == MessageType::kGone ? State::kLost : State::kConfirmed, effects);
    }
    case MessageType::kAccepted: {
      const auto passed_on = passed_on_.extract(message.fork);
      if (!passed_on.empty()) release(passed_on.mapped().hold, effects);
      return;
    }
    case MessageType::kDrop:
      return remove_fork(message.object, message.fork, effects);
  }
}

void ReferenceProtocol::on_down(std::int32_t worker, Effects& effects) {
  if (!down_.insert(worker).second) return;
  // Collected first, since each removal and release changes these maps.
  std::vector<std::pair<ObjectId, ForkId>> forks;
  for (const auto& [object, holders] : objects_) {
    for (const auto& [fork, holder] : holders) {
      if (holder == worker) forks.emplace_back(object, fork);
    }
  }
  for (const auto& [object, fork] : forks) remove_fork(object, fork, effects);
  std::vector<ForkId> passed_on;
  for (const auto& [fork, what] : passed_on_) {
    if (what.to == worker) passed_on.push_back(fork);
  }
  for (const ForkId fork : passed_on) release(passed_on_.extract(fork).mapped().hold, effects);
  std::vector<HoldId> lost;
  for (const auto& [id, hold] : holds_) {
    if (hold.reference.owner == worker) lost.push_back(id);
  }
  for (const HoldId id : lost) {
    // The release of one may have been the end of another.
    if (const auto found = holds_.find(id); found != holds_.end()) resolve_hold(id, State::kLost, effects);
  }
}

std::vector<std::int32_t> ReferenceProtocol::holders(ObjectId object) const {
  std::vector<std::int32_t> workers;
  if (const auto found = objects_.find(object); found != objects_.end()) {
    for (const auto& [fork, worker] : found->second) workers.push_back(worker);
  }
  return workers;
}

}  // namespace cohort::rpc
