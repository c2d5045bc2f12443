#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cohort/rpc/object_id.h"

/// The protocol of remote references: who holds which object, and when nobody does. No value, thread, clock
/// or socket, so a test runs it with messages in any order.
namespace cohort::rpc {

/// A reference on its way: to which object, and as which fork its receiver will hold it.
struct WireReference {
  ObjectId object;
  std::int32_t owner = 0;
  ForkId fork;
};

struct ReferenceMessage {
  enum class Type : std::uint8_t {
    kFork,       ///< to the owner: this worker holds the object by this fork
    kConfirmed,  ///< from the owner: it knows the fork
    kGone,       ///< from the owner: the object was freed, as whoever passed it on has died
    kAccepted,   ///< to who passed it on: it need not keep its own fork for this one any more
    kDrop,       ///< to the owner: the fork is gone
  };
  Type type;
  ObjectId object;
  ForkId fork;
};

/// One worker's part of the protocol. An object lives while it has a fork. Every fork is known to the owner
/// before its holder may use it, and who passes a reference on keeps its own fork until then. Threads: one at
/// a time.
class ReferenceProtocol {
 public:
  using HoldId = std::uint64_t;
  enum class State : std::uint8_t { kWaiting, kConfirmed, kLost };
  /// What a step leads to. Messages may arrive in any order.
  struct Effects {
    std::vector<std::pair<std::int32_t, ReferenceMessage>> messages;
    std::vector<HoldId> resolved;  ///< confirmed or lost: these do not wait any more
    std::vector<ObjectId> freed;   ///< of this worker: nobody holds them
  };

  explicit ReferenceProtocol(std::int32_t self) : self_(self) {}

  /// A hold on a new object, which `owner` is to be asked to make(): it waits until then.
  HoldId create(std::int32_t owner);
  /// At the owner: `holder` has asked for the object. Returns a hold of this worker's own, for whoever makes
  /// the value.
  HoldId make(const WireReference& asked, std::int32_t holder, Effects& effects);
  /// A hold of this worker's on a new object of its own.
  HoldId create_here();

  /// The hold itself, for the message that asks for the object.
  WireReference describe(HoldId hold) const;
  /// A message to `to` takes the reference along. The hold is confirmed.
  WireReference send(HoldId hold, std::int32_t to);
  /// A message of `from` brought it. The hold may have to wait before it may be used.
  HoldId receive(const WireReference& reference, std::int32_t from, Effects& effects);
  /// The owner will never be asked for the object of a new hold.
  void mark_lost(HoldId hold, Effects& effects) { resolve_hold(hold, State::kLost, effects); }
  /// Nobody here uses the hold any more.
  void release(HoldId hold, Effects& effects);

  void on_message(std::int32_t from, const ReferenceMessage& message, Effects& effects);
  /// A worker is dead. What comes of it later changes nothing.
  void on_down(std::int32_t worker, Effects& effects);

  State state(HoldId hold) const { return holds_.at(hold).state; }
  bool has_object(ObjectId object) const { return objects_.count(object) > 0; }
  /// Who holds an object of this worker's, a worker for each fork.
  std::vector<std::int32_t> holders(ObjectId object) const;
  std::size_t num_holds() const { return holds_.size(); }
  std::size_t num_objects() const { return objects_.size(); }
  std::size_t num_passed_on() const { return passed_on_.size(); }

 private:
  struct Hold {
    WireReference reference;
    State state = State::kWaiting;
    int uses = 1;              // of RRefs, and of what was passed on
    std::int32_t parent = -1;  // who is to be told that it need not keep its own; -1: nobody
  };
  // A fork that was made here for another worker, and keeps the hold that it was made from.
  struct PassedOn {
    HoldId hold;
    std::int32_t to;
  };

  ForkId new_fork() { return {self_, next_number_++}; }
  HoldId add(Hold hold);
  void emit(std::int32_t to, const ReferenceMessage& message, Effects& effects);
  void resolve_hold(HoldId hold, State state, Effects& effects);
  void remove_fork(ObjectId object, ForkId fork, Effects& effects);
  void deliver(std::int32_t from, const ReferenceMessage& message, Effects& effects);

  const std::int32_t self_;
  std::uint64_t next_number_ = 1;
  std::map<HoldId, Hold> holds_;
  std::map<ForkId, HoldId> hold_of_fork_;
  std::map<ForkId, PassedOn> passed_on_;
  std::map<ObjectId, std::map<ForkId, std::int32_t>> objects_;  // of this worker: who holds each fork
  std::set<std::int32_t> down_;
  std::vector<ReferenceMessage> to_self_;
  bool is_delivering_ = false;
};

}  // namespace cohort::rpc
