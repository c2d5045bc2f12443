#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/rpc/internal/protocol/reference_protocol.h"
#include "cohort/rpc/reference.h"

namespace cohort::rpc {

/// How a worker's references reach the other workers.
class ReferenceHost {
 public:
  virtual ~ReferenceHost() = default;
  virtual void send_reference_message(std::int32_t to, const ReferenceMessage& message) = 0;
  virtual base::Future<Encoded> call(const Target& target, const char* function, Encoded arguments) = 0;
  /// `asked_at`: where the program asks for the object.
  virtual std::shared_ptr<Reference> make(const Target& target, const char* function, Encoded arguments,
                                          const std::string& asked_at) = 0;
  /// Frees it on a thread that may take its time.
  virtual void free_later(std::shared_ptr<void> what) = 0;
  /// Of what waits, where nothing else is said.
  virtual std::chrono::milliseconds timeout() const = 0;
  /// Throws: CommError for an unknown one.
  virtual WorkerInfo worker(std::int32_t id) const = 0;
  /// Whether a context records the calls of this thread.
  virtual bool is_recording() const = 0;
};

/// The references of a worker, and the objects that it owns. Threads: any.
class References : public std::enable_shared_from_this<References> {
 public:
  using List = std::vector<std::shared_ptr<Reference>>;

  References(std::int32_t self, std::weak_ptr<ReferenceHost> host)
      : self_(self), host_(std::move(host)), protocol_(self) {}

  /// A reference to an object that `owner` is to be asked for: describe() goes into the message. `made_at`:
  /// the line that asks. `is_used`: mark_used() sets it.
  std::shared_ptr<Reference> create(const WorkerInfo& owner, std::string made_at,
                                    std::shared_ptr<std::atomic<bool>> is_used = nullptr);
  WireReference describe(const Reference& reference) const;
  /// The owner cannot be asked: whoever uses the reference gets the error.
  void mark_lost(const Reference& reference, std::exception_ptr error);
  /// A reference to an object here. `made_at`: the line that made it.
  std::shared_ptr<Reference> create_here(ObjectValue value, std::string made_at);
  /// At the owner: `holder` asks for an object. The reference is for whoever makes its value.
  std::shared_ptr<Reference> make(const WireReference& asked, std::int32_t holder, std::string made_at);
  /// The value of an object here, or the error in its place. The first one stays.
  void set_value(const Reference& reference, ObjectValue value, std::exception_ptr error);

  /// Throws: UsageError for a reference of another agent of this process.
  void check_own(const List& references) const;
  /// They go into a call or an answer, by which alone the object of another worker is used.
  static void mark_used(const List& references);
  /// Calls `fn`, which must not throw, once each reference is confirmed or lost: at once, or by another
  /// thread.
  void when_resolved(const List& references, std::function<void()> fn);
  /// For a message to `to`. Throws: OwnerLostError where an object is gone.
  std::vector<WireReference> send(const List& references, std::int32_t to);
  List receive(const std::vector<WireReference>& references, std::int32_t from);
  void on_message(std::int32_t from, const ReferenceMessage& message);
  void on_down(std::int32_t worker, const std::string& why);

  /// At the end of the agent: those that wait for objects which are not made yet get an error.
  void fail_unset();
  /// Frees all objects, which may have references of their own, and forgets who waits.
  void clear();

  /// The objects here: "object 3 of ps/0, made at main.cpp:12, held by trainer/0 and trainer/1".
  std::vector<std::string> describe_objects() const;
  /// The references here: "object 0.3 of ps/0, made at main.cpp:12", "object 0.3 of ps/0, sent by trainer/1".
  std::vector<std::string> describe_references() const;
  std::size_t num_holds() const;
  /// Objects that this worker has passed on, and whose new holders are not known to the owners yet.
  std::size_t num_passed_on() const;

 private:
  friend class Reference;
  struct Object {
    std::string made_at;
    bool is_set = false;  // under the mutex: somebody sets the value, or has set it
    ObjectValue value;    // before the promise is set
    base::Promise<void> promise{"the value of a remote object"};
    base::Future<void> ready = promise.future();
  };
  // Where a reference comes from.
  struct Origin {
    std::string made_at;
    std::int32_t sender = -1;  // -1: it was made here
  };
  struct Waiter {
    std::size_t num_waiting = 0;
    std::function<void()> fn;
  };

  template <typename Step>
  auto run(const Step& step);
  std::shared_ptr<Reference> wrap(ReferenceProtocol::HoldId hold, const WireReference& wire);
  std::shared_ptr<Object> object_of(const Reference& reference) const;
  void check_usable(const Reference& reference) const;

  const std::int32_t self_;
  const std::weak_ptr<ReferenceHost> host_;
  mutable std::mutex mutex_;  // of all below
  bool is_cleared_ = false;
  ReferenceProtocol protocol_;
  std::map<ObjectId, std::shared_ptr<Object>> objects_;
  std::map<ReferenceProtocol::HoldId, Origin> origins_;  // of the references that somebody here has
  std::multimap<ReferenceProtocol::HoldId, std::shared_ptr<Waiter>> waiters_;
  std::map<std::int32_t, std::string> down_;                        // why
  std::map<ReferenceProtocol::HoldId, std::exception_ptr> errors_;  // of those whose owner could not be asked
};

}  // namespace cohort::rpc
