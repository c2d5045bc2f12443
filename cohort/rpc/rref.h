#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "cohort/base/error.h"
#include "cohort/rpc/codec.h"
#include "cohort/rpc/future.h"
#include "cohort/rpc/reference.h"

/// Remote references: objects that stay on the worker that made them.
///
///     std::shared_ptr<Table> make_table(std::int64_t rows);
///     COHORT_REMOTE(make_table);
///     COHORT_REMOTE(Table::lookup);
///
///     rpc::RRef<Table> table = agent.remote<&make_table>("ps/0", 10'000);  // returns at once
///     at::Tensor x = table.rpc_sync<&Table::lookup>(words);                // runs on ps/0
///     agent.rpc_sync<&train>("trainer/1", table);                          // trainer/1 has a reference too
namespace cohort::rpc {

template <auto function>
const char* name_of();
template <auto function, typename... Args>
Encoded encode_arguments(Args&&... args);
template <typename Function>
struct FunctionType;

/// Whether a value of this type can be sent.
template <typename T>
concept Travels = requires(Writer& out, const T& value) { Codec<T>::write(out, value); };

/// What is kept of a result that stays on its worker: `T` of shared_ptr<T>, the module of a ModuleHolder,
/// else the result.
template <typename R>
struct KeptType {
  using Type = R;
};
template <typename T>
struct KeptType<std::shared_ptr<T>> {
  using Type = T;
};
template <typename R>
  requires requires(R result) { result.ptr().get(); }
struct KeptType<R> {
  using Type = typename decltype(std::declval<R>().ptr())::element_type;
};
/// What an RRef to a function's result refers to.
template <typename R>
using Kept = typename KeptType<R>::Type;

/// A reference to a `T` on some worker. The object lives as long as any worker has a reference to it. An
/// empty one refers to nothing. Threads: as a shared_ptr.
///
/// What waits ends at the agent's timeout, or at within()'s (zero: none), and no later than the call that
/// this thread answers. In a handler whose call has a deadline local_value() without within() waits until
/// then. What needs the owner throws OwnerLostError where it is gone, and what the function threw that was to
/// make the object.
template <typename T>
class RRef {
 public:
  using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  RRef() = default;
  explicit RRef(std::shared_ptr<Reference> reference) : reference_(std::move(reference)) {}
  explicit operator bool() const { return reference_ != nullptr; }

  /// The worker that keeps the object. Throws, as all below: UsageError for an empty one.
  const WorkerInfo& owner() const { return get().owner(); }
  /// Whether this worker does.
  bool is_owner() const { return get().is_owner(); }
  /// Whether the owner knows of this worker's reference. One that came as an argument or as a result is
  /// confirmed.
  bool confirmed_by_owner() const { return get().is_confirmed(); }
  /// The same reference, with another timeout.
  RRef within(std::chrono::milliseconds time) const {
    RRef rref = *this;
    rref.timeout_ = time;
    return rref;
  }
  /// The same reference, with functions that run one after the other, as Target::in_order() says.
  RRef in_order(std::string channel) const {
    RRef rref = *this;
    rref.channel_ = std::move(channel);
    return rref;
  }

  /// The object, on its owner, once it is made. Throws: UsageError on another worker.
  std::shared_ptr<Value> local_value() const {
    const ObjectValue value = get().value(timeout_);
    if (value.type != typeid(Value)) throw_type(get(), value.type.name());
    return std::static_pointer_cast<Value>(value.pointer);
  }
  /// A copy of the object; on its owner the object itself, as its copy constructor copies it. A context
  /// records it (dist_autograd.h): then a copy on the owner too, if gradients come for it.
  T to_here() const {
    static_assert(Travels<Value>, "an object of this type cannot travel: call its functions where it is");
    // A recorded call carries the value's gradients, on the owner too: so their order does not depend on who
    // owns it.
    if (!is_owner() || get().is_recorded(timeout_)) return to_here_async().get();
    if constexpr (std::is_void_v<T>) {
      local_value();
    } else {
      return *local_value();
    }
  }
  /// The same, at once: a Future of the copy.
  Future<T> to_here_async() const {
    get();
    return Future<T>(fetch_value(reference_, timeout_));
  }

  /// A Future that is there once the object is made: nothing of it is copied. Its get() throws what the
  /// function threw that was to make the object.
  Future<void> when_made() const {
    get();
    return Future<void>(await_value(reference_, timeout_));
  }
  /// "object 0.3 of ps/0": the id of the worker that asked for it, and its number there.
  std::string describe() const { return get().describe(); }

  /// Calls a member function of the object, on its owner.
  template <auto function, typename... Args>
  auto rpc_async(Args&&... args) const {
    using Returned = typename FunctionType<decltype(function)>::Returned;
    return Future<Returned>(get().call({timeout_, channel_}, name_of<function>(),
                                       encode_arguments<function>(*this, std::forward<Args>(args)...)));
  }
  /// The same, and blocks for the result. Throws: what the function threw.
  template <auto function, typename... Args>
  auto rpc_sync(Args&&... args) const {
    return rpc_async<function>(std::forward<Args>(args)...).get();
  }
  /// The same, with a result that stays on the owner.
  template <auto function, typename... Args>
  auto remote(Args&&... args) const {
    using Returned = typename FunctionType<decltype(function)>::Returned;
    return RRef<Kept<Returned>>(get().make({timeout_, channel_}, name_of<function>(),
                                           encode_arguments<function>(*this, std::forward<Args>(args)...)));
  }

  /// What this module counts holds by; null for an empty one.
  const std::shared_ptr<Reference>& reference() const { return reference_; }

 private:
  [[noreturn]] static void throw_type(const Reference& reference, const char* type) {
    throw UsageError("rpc.rref",
                     base::concat(reference.describe(), " is a ", type, ", not a ", typeid(Value).name()));
  }
  const Reference& get() const {
    if (reference_ == nullptr) throw UsageError("rpc.rref", "an empty RRef refers to no object");
    return *reference_;
  }

  std::shared_ptr<Reference> reference_;
  std::optional<std::chrono::milliseconds> timeout_;
  std::optional<std::string> channel_;
};

/// The reference, not the object.
template <typename T>
struct Codec<RRef<T>> {
  static void write(Writer& out, const RRef<T>& value) { out.reference(value.reference()); }
  static RRef<T> read(Reader& in) { return RRef<T>(in.reference()); }
  static void describe(TypeText& text) {
    if constexpr (Travels<typename RRef<T>::Value>) {
      text.add_template<typename RRef<T>::Value>("RRef");
    } else {
      text.add("RRef");
    }
  }
};

/// An object: a result that stays where it is. Only remote() may call a function that returns one.
template <typename T>
  requires(!std::is_same_v<Kept<T>, T>)
struct Codec<T> {
  static void write(Writer&, const T&) {
    throw UsageError(
        "rpc.encode",
        "a function that returns a shared_ptr or a module returns an object, which cannot travel",
        "remote(), whose result stays there");
  }
  static T read(Reader&) { throw CommError("rpc.decode", "an object cannot travel"); }
  static void describe(TypeText& text) { text.add("object"); }
};

/// Makes the value of an object from a function's result.
template <typename R>
ObjectValue make_object_value(R result) {
  using T = Kept<R>;
  ObjectValue value;
  if constexpr (std::is_same_v<T, R>) {
    value.pointer = std::make_shared<T>(std::move(result));
  } else if constexpr (std::is_same_v<std::shared_ptr<T>, R>) {
    value.pointer = std::move(result);
  } else {
    value.pointer = result.ptr();
  }
  if (value.pointer == nullptr)
    throw UsageError("rpc.remote", "the function returned null in place of an object");
  value.type = typeid(T);
  if constexpr (Travels<T>) {
    value.encode = [](const void* pointer) {
      Writer out;
      encode(out, *static_cast<const T*>(pointer));
      return out.take();
    };
    // Not of an object that its maker may still have.
    if constexpr (std::is_same_v<T, R>) {
      value.decode = [](const Encoded& encoded) -> std::shared_ptr<void> {
        Reader in(encoded);
        return std::make_shared<T>(decode<T>(in));
      };
    }
  }
  return value;
}

/// A reference to an object of this worker: in a handler, of the one that runs it; else of the process's
/// agent.
template <typename T>
auto make_rref(T object, Target::Line line = Target::Line::current()) {
  return RRef<Kept<T>>(make_reference(make_object_value(std::move(object)), line));
}

/// Makes a `T` from these arguments: for remote(), as in COHORT_REMOTE(rpc::make<Table, std::int64_t>).
template <typename T, typename... P>
std::shared_ptr<T> make(P... arguments) {
  return std::make_shared<T>(std::move(arguments)...);
}

}  // namespace cohort::rpc
