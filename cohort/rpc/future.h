#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <type_traits>
#include <utility>
#include <variant>

#include "cohort/base/threads/future.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/rpc/call_context.h"
#include "cohort/rpc/codec.h"

namespace cohort::rpc {

/// The result of a remote call, or of a handler that answers later. A copy is of the same result; one takes it.
///
///     rpc::Future<at::Tensor> sum = agent.rpc_async<add>("ps/0", x, y);
///     at::Tensor z = sum.get();             // or throws what the function threw there
///
/// A remote function may return one: its call is answered once the result is there, and no thread waits for it.
/// Several calls may be answered with one result.
template <typename T>
class Future {
 public:
  using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  Future() = default;
  explicit Future(base::Future<Encoded> encoded) : encoded_(std::move(encoded)) {}

  /// Whether the result, or the error, is there: get() would not block.
  bool ready() const { return encoded_.ready(); }
  /// Returns whether it was there before the deadline.
  bool wait(base::Deadline deadline) const {
    const base::ThreadPool::Waiting waiting;
    return encoded_.wait(deadline);
  }
  /// Has `fn`, which must not throw, called once it is there: by the thread that sets it, or at once. For a call that is the
  /// agent's thread, or one that waits for a call, which read for all: `fn` must not wait, call rpc_sync(), or compute for
  /// long.
  void on_ready(std::function<void()> fn) const { encoded_.on_ready(std::move(fn)); }

  /// Returns the value, once, or throws the error. A remote call ends at its own deadline; within a handler the
  /// wait ends by 100 ms after the deadline of the call that it answers.
  T get() {
    // The call's own error comes first: it names worker and call.
    return get(remaining_deadline().later(std::chrono::milliseconds(100)));
  }
  /// The same, with a deadline of the caller's. Throws, besides: TimeoutError.
  T get(base::Deadline deadline) {
    const Encoded encoded = [&] {
      const base::ThreadPool::Waiting waiting;
      return encoded_.get(deadline);
    }();
    Reader in(encoded);
    Value value = decode<Value>(in);
    in.finish();
    if constexpr (!std::is_void_v<T>) return value;
  }
  /// Returns the encoded value, which stays for others, or throws the error: once it is ready().
  /// Threads: any, but not while another one calls get().
  Encoded encoded() const { return encoded_.copy(base::Deadline(std::chrono::seconds(0))); }

 private:
  base::Future<Encoded> encoded_;
};

/// Sets a result for a handler that answers later. One that is destroyed without gives its future an error.
template <typename T>
class Promise {
 public:
  using Value = typename Future<T>::Value;

  Promise() : encoded_("a result that a handler promised") {}

  /// The future that a handler returns. Handlers of several calls may return one each. Each caller gets
  /// tensors of its own. Objects that remote() makes share the memory of the value's tensors.
  Future<T> future() const { return Future<T>(encoded_.future()); }
  /// Encodes `value` and sets it as the result. Its tensors must stay as they are: they may not be sent yet.
  void set_value(const Value& value) {
    encoded_.run([&] {
      Writer out;
      encode(out, value);
      return out.take();
    });
  }
  /// Sets the result of a Promise<void>.
  void set_value()
    requires std::is_void_v<T>
  {
    set_value(std::monostate());
  }
  /// Has get() throw `error` where the result is asked for.
  void set_error(std::exception_ptr error) { encoded_.set_error(std::move(error)); }

 private:
  base::Promise<Encoded> encoded_;
};

}  // namespace cohort::rpc
