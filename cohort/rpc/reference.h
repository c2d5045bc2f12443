#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <typeindex>

#include "cohort/base/error.h"
#include "cohort/base/threads/future.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/encoded.h"
#include "cohort/rpc/object_id.h"

/// What the RRefs of a worker share. Users have RRef<T> (cohort/rpc/rref.h).
namespace cohort::rpc {

class ReferenceHost;
class References;

/// The object of a reference is gone, as its owner is.
class OwnerLostError : public PeerError {
 public:
  using PeerError::PeerError;
};

/// The value of an object, on the worker that owns it.
struct ObjectValue {
  std::shared_ptr<void> pointer;  ///< the object; its type is `type`
  std::type_index type = typeid(void);
  Encoded (*encode)(const void* value) = nullptr;                     ///< null: it cannot travel
  std::shared_ptr<void> (*decode)(const Encoded& encoded) = nullptr;  ///< null: it must not be replaced
};

/// One worker's hold on an object, by which the object lives. Threads: any.
class Reference {
 public:
  using Timeout = std::optional<std::chrono::milliseconds>;  // else the agent's
  /// Of a call: as Target has them.
  struct CallOptions {
    Timeout timeout = {};
    std::optional<std::string> channel = {};
  };
  Reference(std::shared_ptr<References> home, std::uint64_t hold, ObjectId object, WorkerInfo owner);
  ~Reference();
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  /// The worker that keeps the object.
  const WorkerInfo& owner() const { return owner_; }
  /// Whether this worker does.
  bool is_owner() const;
  /// Whether it is this agent's.
  bool is_of(const ReferenceHost& agent) const;
  /// Whether the owner knows of this hold. Throws: OwnerLostError.
  bool is_confirmed() const;
  /// At the owner: whether a context records a fetch of the value by this thread, as gradients come for it.
  /// Waits for the value, and throws, as value().
  bool is_recorded(Timeout timeout) const;
  /// "object 0.3 of ps/0": the id of the worker that asked for it, and its number there.
  std::string describe() const;

  /// At the owner: the value once it is made, or what its maker threw. Throws: UsageError elsewhere;
  /// TimeoutError.
  ObjectValue value(Timeout timeout) const;
  /// At the owner: has `fn`, which must not throw, called once value() would not wait.
  void on_value(std::function<void()> fn) const;

  /// Calls a function on the owner. Throws: OwnerLostError; a call that is under way then ends with
  /// PeerError.
  base::Future<Encoded> call(CallOptions options, const char* function, Encoded arguments) const;
  /// A reference to the result of a function that runs on the owner.
  std::shared_ptr<Reference> make(CallOptions options, const char* function, Encoded arguments) const;

 private:
  friend class References;
  std::shared_ptr<ReferenceHost> host() const;
  const std::shared_ptr<References> home_;
  const std::uint64_t hold_;
  const ObjectId object_;
  const WorkerInfo owner_;
  std::shared_ptr<std::atomic<bool>> is_used_;  // References::create(). May be null
};

/// A reference to an object of the worker whose handler this thread runs; outside of handlers, of the
/// process's agent. Throws: UsageError where there is neither.
std::shared_ptr<Reference> make_reference(ObjectValue value, Target::Line line);

/// The value that a reference points to, encoded, from its owner.
base::Future<Encoded> fetch_value(const std::shared_ptr<Reference>& reference, Reference::Timeout timeout);
/// Nothing, encoded, once the object is made; or what its maker threw.
base::Future<Encoded> await_value(const std::shared_ptr<Reference>& reference, Reference::Timeout timeout);

}  // namespace cohort::rpc
