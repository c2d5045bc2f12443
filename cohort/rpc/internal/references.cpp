// Joins three parts: ReferenceProtocol, which decides and does nothing else, the objects that this worker
// owns, and the host that sends. Every event is a step of the protocol under the mutex. It fills an
// `Effects`; what follows from that (messages, functions that waited, values that are freed) happens after
// the mutex is released. The reason is that a value's destructor may drop references of its own, which takes
// the mutex.
//
// A value is set once and read without the mutex: `promise` publishes it. The host is held weakly, because
// references may live longer than the agent.
#include "cohort/rpc/internal/references.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/rpc/call_context.h"
#include "cohort/rpc/internal/backward_failures.h"

namespace cohort::rpc {

using State = ReferenceProtocol::State;

namespace {

[[noreturn]] void throw_stopped(const Reference& reference) {
  throw UsageError("rpc.rref",
                   base::concat(reference.describe(), " is used, but its agent has been stopped"));
}

Target target_of(const WorkerInfo& owner, Reference::CallOptions options) {
  Target target(owner);
  target.timeout = options.timeout;
  target.channel = std::move(options.channel);
  return target;
}

}  // namespace

// Runs `step(effects)` under the mutex, and then what it leads to.
template <typename Step>
auto References::run(const Step& step) {
  ReferenceProtocol::Effects effects;
  std::vector<std::function<void()>> ready;
  std::vector<std::shared_ptr<Object>> freed;
  const auto take_effects = [&] {
    for (const ReferenceProtocol::HoldId hold : effects.resolved) {
      const auto [begin, end] = waiters_.equal_range(hold);
      for (auto waiter = begin; waiter != end; ++waiter) {
        // A list of references has one waiter, and the last reference that is resolved runs it.
        if (--waiter->second->num_waiting == 0) ready.push_back(std::move(waiter->second->fn));
      }
      waiters_.erase(begin, end);
    }
    for (const ObjectId object : effects.freed) {
      if (auto found = objects_.extract(object)) freed.push_back(std::move(found.mapped()));
    }
  };
  const auto run_effects = [&] {
    if (const auto host = host_.lock()) {
      for (const auto& [to, message] : effects.messages) host->send_reference_message(to, message);
    }
    for (const auto& fn : ready) fn();
    if (const auto host = host_.lock()) {
      for (auto& object : freed) host->free_later(std::move(object));
    }
  };
  std::unique_lock lock(mutex_);
  if constexpr (std::is_void_v<decltype(step(effects))>) {
    step(effects);
    take_effects();
    lock.unlock();
    run_effects();
  } else {
    auto result = step(effects);
    take_effects();
    lock.unlock();
    run_effects();
    return result;
  }
}

std::shared_ptr<Reference> References::wrap(ReferenceProtocol::HoldId hold, const WireReference& wire) {
  const auto host = host_.lock();
  return std::make_shared<Reference>(shared_from_this(), hold, wire.object,
                                     host ? host->worker(wire.owner) : WorkerInfo{"", wire.owner});
}

std::shared_ptr<Reference> References::create(const WorkerInfo& owner, std::string made_at,
                                              std::shared_ptr<std::atomic<bool>> is_used) {
  const std::lock_guard lock(mutex_);
  const ReferenceProtocol::HoldId hold = protocol_.create(owner.id);
  const ObjectId id = protocol_.describe(hold).object;
  // Whoever asks for an object of this worker waits. The references that its maker takes may have to be
  // resolved first.
  if (owner.id == self_) {
    auto object = std::make_shared<Object>();
    object->made_at = made_at;
    objects_.emplace(id, std::move(object));
  }
  origins_[hold].made_at = std::move(made_at);
  auto reference = std::make_shared<Reference>(shared_from_this(), hold, id, owner);
  reference->is_used_ = std::move(is_used);
  return reference;
}

WireReference References::describe(const Reference& reference) const {
  const std::lock_guard lock(mutex_);
  return protocol_.describe(reference.hold_);
}

void References::mark_lost(const Reference& reference, std::exception_ptr error) {
  std::shared_ptr<Object> unmade;  // of this worker
  run([&](auto& effects) {
    errors_[reference.hold_] = error;
    if (const auto found = objects_.find(reference.object_); found != objects_.end()) {
      if (!std::exchange(found->second->is_set, true)) unmade = std::move(found->second);
      objects_.erase(found);
    }
    protocol_.mark_lost(reference.hold_, effects);
  });
  // Without the mutex, as functions that wait for the object run here.
  if (unmade != nullptr) unmade->promise.set_error(std::move(error));
}

void References::fail_unset() {
  std::vector<std::pair<ObjectId, std::shared_ptr<Object>>> unset;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, object] : objects_) {
      if (!std::exchange(object->is_set, true)) unset.emplace_back(id, object);
    }
  }
  for (const auto& [id, object] : unset) {
    object->promise.set_error(std::make_exception_ptr(UsageError(
        "rpc.rref", base::concat("object ", id.creator, '.', id.number, ", made at ", object->made_at,
                                 ", was not made yet, and its agent has been stopped"))));
  }
}

// The locals are declared before the lock, so objects are destroyed after it: they may hold references.
void References::clear() {
  fail_unset();
  std::map<ObjectId, std::shared_ptr<Object>> objects;
  std::multimap<ReferenceProtocol::HoldId, std::shared_ptr<Waiter>> waiters;
  const std::lock_guard lock(mutex_);
  is_cleared_ = true;
  objects.swap(objects_);
  waiters.swap(waiters_);
}

std::shared_ptr<Reference> References::create_here(ObjectValue value, std::string made_at) {
  ReferenceProtocol::HoldId hold = 0;
  WireReference wire;
  {
    const std::lock_guard lock(mutex_);
    hold = protocol_.create_here();
    wire = protocol_.describe(hold);
    auto object = std::make_shared<Object>();
    object->made_at = made_at;
    objects_.emplace(wire.object, std::move(object));
    origins_[hold].made_at = std::move(made_at);
  }
  auto reference = wrap(hold, wire);
  set_value(*reference, std::move(value), nullptr);
  return reference;
}

std::shared_ptr<Reference> References::make(const WireReference& asked, std::int32_t holder,
                                            std::string made_at) {
  const ReferenceProtocol::HoldId hold = run([&](auto& effects) {
    // It is there already where this worker asks itself: create().
    std::shared_ptr<Object>& object = objects_[asked.object];
    if (object == nullptr) object = std::make_shared<Object>();
    object->made_at = made_at;
    const ReferenceProtocol::HoldId own = protocol_.make(asked, holder, effects);
    origins_[own].made_at = std::move(made_at);
    return own;
  });
  return wrap(hold, asked);
}

void References::set_value(const Reference& reference, ObjectValue value, std::exception_ptr error) {
  std::shared_ptr<Object> object;
  {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reference.object_);
    if (found == objects_.end()) return;                     // the agent has been stopped
    if (std::exchange(found->second->is_set, true)) return;  // its time was over
    object = found->second;
  }
  // Whoever set is_set is alone here, so no mutex is needed, and functions that wait may take it.
  object->value = std::move(value);
  object->promise.set_error(std::move(error));
}

void References::check_own(const List& references) const {
  for (const auto& reference : references) {
    if (reference->home_.get() == this) continue;
    throw UsageError("rpc.rref",
                     base::concat(reference->describe(), " is known to another agent of this process"),
                     "a reference that this agent's calls have given");
  }
}

void References::mark_used(const List& references) {
  for (const auto& reference : references) {
    if (reference->is_used_ != nullptr) *reference->is_used_ = true;
  }
}

void References::when_resolved(const List& references, std::function<void()> fn) {
  {
    const std::lock_guard lock(mutex_);
    const auto waiter = std::make_shared<Waiter>();
    for (const auto& reference : references) {
      if (protocol_.state(reference->hold_) != State::kWaiting) continue;
      ++waiter->num_waiting;
      waiters_.emplace(reference->hold_, waiter);
    }
    if (waiter->num_waiting > 0) {
      waiter->fn = std::move(fn);
      return;
    }
  }
  // Without the mutex: it may use references.
  fn();
}

// Under the mutex.
void References::check_usable(const Reference& reference) const {
  if (is_cleared_) throw_stopped(reference);
  if (protocol_.state(reference.hold_) != State::kLost) return;
  if (const auto error = errors_.find(reference.hold_); error != errors_.end()) {
    std::rethrow_exception(error->second);
  }
  const auto down = down_.find(reference.owner().id);
  throw OwnerLostError(
      "rpc.rref",
      base::concat(reference.describe(), ": ",
                   down != down_.end() ? down->second
                                       : "it was freed, as the worker that passed the reference on died"));
}

std::vector<WireReference> References::send(const List& references, std::int32_t to) {
  if (references.empty()) return {};
  const std::lock_guard lock(mutex_);
  // All before the first fork is made: an error must not leave forks that nobody receives.
  for (const auto& reference : references) check_usable(*reference);
  std::vector<WireReference> wires;
  for (const auto& reference : references) wires.push_back(protocol_.send(reference->hold_, to));
  return wires;
}

References::List References::receive(const std::vector<WireReference>& references, std::int32_t from) {
  List list;
  for (const WireReference& wire : references) {
    const ReferenceProtocol::HoldId hold = run([&](auto& effects) {
      const ReferenceProtocol::HoldId received = protocol_.receive(wire, from, effects);
      origins_[received].sender = from;
      return received;
    });
    list.push_back(wrap(hold, wire));
  }
  return list;
}

void References::on_message(std::int32_t from, const ReferenceMessage& message) {
  run([&](auto& effects) { protocol_.on_message(from, message, effects); });
}

void References::on_down(std::int32_t worker, const std::string& why) {
  run([&](auto& effects) {
    down_[worker] = why;
    protocol_.on_down(worker, effects);
  });
}

std::shared_ptr<References::Object> References::object_of(const Reference& reference) const {
  const std::lock_guard lock(mutex_);
  check_usable(reference);
  const auto found = objects_.find(reference.object_);
  if (found == objects_.end()) {
    throw UsageError("rpc.rref",
                     base::concat(reference.describe(), " lies on ", reference.owner().name, ", not here"),
                     "to_here(), or a call of one of its functions");
  }
  return found->second;
}

std::vector<std::string> References::describe_objects() const {
  const auto host = host_.lock();
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  for (const auto& [id, object] : objects_) {
    std::vector<std::string> holders;
    for (const std::int32_t holder : protocol_.holders(id)) {
      holders.push_back(host ? host->worker(holder).name : std::to_string(holder));
    }
    lines.push_back(base::concat("object ", id.creator, '.', id.number, ", made at ", object->made_at,
                                 ", held by ", base::join(holders)));
  }
  return lines;
}

std::vector<std::string> References::describe_references() const {
  const auto host = host_.lock();
  const auto name_of_worker = [&](std::int32_t worker) {
    return host ? host->worker(worker).name : std::to_string(worker);
  };
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  for (const auto& [hold, origin] : origins_) {
    const WireReference wire = protocol_.describe(hold);
    lines.push_back(base::concat("object ", wire.object.creator, '.', wire.object.number, " of ",
                                 name_of_worker(wire.owner), origin.sender < 0 ? ", made at " : ", sent by ",
                                 origin.sender < 0 ? origin.made_at : name_of_worker(origin.sender)));
  }
  return lines;
}

std::size_t References::num_passed_on() const {
  const std::lock_guard lock(mutex_);
  return protocol_.num_passed_on();
}

std::size_t References::num_holds() const {
  const std::lock_guard lock(mutex_);
  return protocol_.num_holds();
}

Reference::Reference(std::shared_ptr<References> home, std::uint64_t hold, ObjectId object, WorkerInfo owner)
    : home_(std::move(home)), hold_(hold), object_(object), owner_(std::move(owner)) {}

Reference::~Reference() {
  // A step as any other: it may send kDrop, or free an object of this worker.
  home_->run([&](auto& effects) {
    home_->errors_.erase(hold_);
    home_->origins_.erase(hold_);
    home_->protocol_.release(hold_, effects);
  });
}

bool Reference::is_owner() const {
  return owner_.id == home_->self_;
}

bool Reference::is_of(const ReferenceHost& agent) const {
  return home_->host_.lock().get() == &agent;
}

bool Reference::is_confirmed() const {
  const std::lock_guard lock(home_->mutex_);
  home_->check_usable(*this);
  return home_->protocol_.state(hold_) == State::kConfirmed;
}

std::string Reference::describe() const {
  return base::concat("object ", object_.creator, '.', object_.number, " of ", owner_.name);
}

std::shared_ptr<ReferenceHost> Reference::host() const {
  {
    const std::lock_guard lock(home_->mutex_);
    home_->check_usable(*this);
  }
  auto host = home_->host_.lock();
  if (host == nullptr) throw_stopped(*this);
  return host;
}

ObjectValue Reference::value(Timeout timeout) const {
  const std::shared_ptr<References::Object> object = home_->object_of(*this);
  if (!object->ready.ready()) {
    // Another function of the pool may run meanwhile: the value may be what that function makes.
    const base::ThreadPool::Waiting waiting;
    // A handler has the time of the call that it answers. The call may have none.
    const base::Deadline of_call = remaining_deadline();
    const base::Deadline deadline = timeout              ? deadline_of(*timeout)
                                    : of_call.is_never() ? deadline_of(host()->timeout())
                                                         : of_call;
    wait_in_backward(object->ready, deadline.sooner(of_call));
    base::Future<void>(object->ready).get(deadline.sooner(of_call));
  } else {
    base::Future<void>(object->ready).get(base::Deadline::never());
  }
  return object->value;
}

bool Reference::is_recorded(Timeout timeout) const {
  if (!host()->is_recording()) return false;
  const ObjectValue known = value(timeout);
  if (known.encode == nullptr) return false;
  const Encoded encoded = known.encode(known.pointer.get());
  // Values of recorded objects are leaves too. A parameter's gradient has its place in the order of calls,
  // whoever fetches it.
  return std::any_of(encoded.tensors.begin(), encoded.tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad() && tensor.is_leaf(); });
}

void Reference::on_value(std::function<void()> fn) const {
  home_->object_of(*this)->ready.on_ready(std::move(fn));
}

base::Future<Encoded> Reference::call(CallOptions options, const char* function, Encoded arguments) const {
  return host()->call(target_of(owner_, std::move(options)), function, std::move(arguments));
}

std::shared_ptr<Reference> Reference::make(CallOptions options, const char* function,
                                           Encoded arguments) const {
  return host()->make(target_of(owner_, std::move(options)), function, std::move(arguments),
                      "a call of " + describe());
}

}  // namespace cohort::rpc
