#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/base/threads/future.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/rpc/call_context.h"
#include "cohort/rpc/codec.h"

namespace cohort::rpc {

template <typename T>
class Future;
template <typename T>
class Promise;

namespace function_detail {

template <typename T>
inline constexpr bool is_future = false;
template <typename T>
inline constexpr bool is_future<Future<T>> = true;
template <typename T>
struct AwaitedType {
  using Type = T;
};
template <typename T>
struct AwaitedType<Future<T>> {
  using Type = T;
};
template <typename T>
using Awaited = typename AwaitedType<T>::Type;

// Calls `fn` as a thread would call it that is in no handler and no context, and has LibTorch's modes at
// their defaults.
void call_without_caller(const std::function<void()>& fn);

// Waits where this thread goes backward. Throws the error of that backward, if it fails before the result is
// there.
void wait_unless_backward_fails(const base::Future<Encoded>& result, base::Deadline deadline);

}  // namespace function_detail

/// The result of a remote call, or of a handler that answers later. A copy is of the same result: its tensors
/// share memory.
///
///     rpc::Future<at::Tensor> sum = agent.rpc_async<add>("ps/0", x, y);
///     at::Tensor z = sum.get();             // or throws what the function threw there
///     rpc::Future<at::Tensor> next = agent.rpc_async<add>("ps/0", x, y).then(
///         [&](rpc::Future<at::Tensor> z) { return agent.rpc_async<add>("ps/1", z.get(), y); });
///
/// A remote function may return one: its call is answered once the result is there, and no thread waits for
/// it. Several calls may be answered with one result.
template <typename T>
class Future {
 public:
  using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  Future() = default;
  explicit Future(base::Future<Encoded> encoded) : encoded_(std::move(encoded)) {}

  /// Whether the result, or the error, is there: get() would not block.
  bool ready() const { return encoded_.ready(); }
  /// Returns whether it was there before the deadline. Throws, as get(): within a backward of a context (in a
  /// hook, or a second run of recompute()) the error of that backward, once it fails.
  bool wait(base::Deadline deadline) const {
    const base::ThreadPool::Waiting waiting;
    function_detail::wait_unless_backward_fails(encoded_, deadline);
    return encoded_.wait(deadline);
  }
  /// Has `fn`, which must not throw, called once it is there: by the thread that sets it, or at once. For a
  /// call that is the agent's thread, or one that waits for a call, which read for all: `fn` must not wait,
  /// call rpc_sync(), or compute for long.
  void on_ready(std::function<void()> fn) const { encoded_.on_ready(std::move(fn)); }

  /// Returns a future of what `fn` returns: a value that travels, nothing, or the result of another Future.
  /// What `fn` throws is thrown by its get(). `fn` is called once this result, or the error, is there, with a
  /// future of its own of it. It runs where a function of on_ready() does, so it must not wait, but may begin
  /// calls. It has nothing of the thread's state, also where this result is there already: gradients are on,
  /// no context of distributed autograd records its calls, they get no random key, and no deadline of a
  /// handler. May be called several times.
  template <typename Fn>
  auto then(Fn fn) const;

  /// Returns the value, or throws the error. After the value this future is empty; copies still have it. A
  /// remote call ends at its own deadline; within a handler the wait ends by 100 ms after the deadline of the
  /// call that it answers.
  T get() {
    // The call's own error comes first: it names worker and call.
    return get(remaining_deadline().later(std::chrono::milliseconds(100)));
  }
  /// The same, with a deadline of the caller's. Throws, besides: TimeoutError.
  T get(base::Deadline deadline) {
    const Encoded encoded = [&] {
      const base::ThreadPool::Waiting waiting;
      function_detail::wait_unless_backward_fails(encoded_, deadline);
      return encoded_.copy(deadline);  // others may read it at the same time
    }();
    encoded_ = {};
    Reader in(encoded);
    Value value = decode<Value>(in);
    in.finish();
    if constexpr (!std::is_void_v<T>) return value;
  }
  /// Returns the encoded value, or throws the error: once it is ready().
  Encoded encoded() const { return encoded_.copy(base::Deadline(std::chrono::seconds(0))); }

  /// A future of its own of the same result, once it is ready().
  Future own() const {
    Promise<T> promise;
    promise.set_from(*this);
    return promise.future();
  }

 private:
  base::Future<Encoded> encoded_;
};

/// Sets a result, once, for a handler that answers later. One that is destroyed without gives its future an
/// error. The functions set_...() throw UsageError where it has been set. Several parties may set a result,
/// such as the answers of two calls: they use try_set_...(). The first one sets it, and the others get false.
template <typename T>
class Promise {
 public:
  using Value = typename Future<T>::Value;

  Promise() : encoded_("a result that a handler promised") {}

  /// The future that a handler returns. Handlers of several calls may return one each. Each caller gets
  /// tensors of its own. Objects that remote() makes share the memory of the value's tensors.
  Future<T> future() const { return Future<T>(encoded_.future()); }
  /// Encodes `value` and sets it as the result. Its tensors must stay as they are: they may not be sent yet.
  void set_value(const Value& value) { encoded_.run(encoder_of(value)); }
  bool try_set_value(const Value& value) { return encoded_.try_run(encoder_of(value)); }
  /// Sets the result of a Promise<void>.
  void set_value()
    requires std::is_void_v<T>
  {
    set_value(std::monostate());
  }
  bool try_set_value()
    requires std::is_void_v<T>
  {
    return try_set_value(std::monostate());
  }
  /// Sets what another future has, which is ready().
  void set_from(const Future<T>& source) {
    encoded_.run([&] { return source.encoded(); });
  }
  bool try_set_from(const Future<T>& source) {
    return encoded_.try_run([&] { return source.encoded(); });
  }
  /// Has get() throw `error` where the result is asked for.
  void set_error(std::exception_ptr error) { encoded_.set_error(std::move(error)); }
  bool try_set_error(std::exception_ptr error) { return encoded_.try_set_error(std::move(error)); }

 private:
  static auto encoder_of(const Value& value) {
    return [&value] {
      Writer out;
      encode(out, value);
      return out.take();
    };
  }

  base::Promise<Encoded> encoded_;
};

template <typename T>
template <typename Fn>
auto Future<T>::then(Fn fn) const {
  using Returned = std::remove_cvref_t<std::invoke_result_t<Fn&, Future<T>>>;
  using Later = function_detail::Awaited<Returned>;
  const auto promise = std::make_shared<Promise<Later>>();
  on_ready([source = *this, promise, function = std::make_shared<Fn>(std::move(fn))] {
    try {
      // Whether the result is there already is chance: it must not decide what the function's calls inherit.
      function_detail::call_without_caller([&] {
        if constexpr (function_detail::is_future<Returned>) {
          const Future<Later> inner = (*function)(source.own());
          inner.on_ready([inner, promise] { promise->set_from(inner); });
        } else if constexpr (std::is_void_v<Returned>) {
          (*function)(source.own());
          promise->set_value();
        } else {
          promise->set_value((*function)(source.own()));
        }
      });
    } catch (...) {
      promise->set_error(std::current_exception());
    }
  });
  return promise->future();
}

/// What several futures have together: their values in order; nothing for those of void.
template <typename T>
using Collected = std::conditional_t<std::is_void_v<T>, void, std::vector<typename Future<T>::Value>>;

/// Returns a future of all values. It has the first error as soon as one of the futures has it. Values must
/// travel.
template <typename T>
Future<Collected<T>> collect_all(const std::vector<Future<T>>& futures) {
  struct Collecting {
    explicit Collecting(std::size_t size) : values(size), num_missing(size) {}
    std::vector<std::optional<typename Future<T>::Value>> values;
    std::atomic<std::size_t> num_missing;
    Promise<Collected<T>> promise;

    void finish() {
      if constexpr (std::is_void_v<T>) {
        promise.set_value();
      } else {
        Collected<T> all;
        for (auto& value : values) all.push_back(*std::move(value));
        promise.set_value(all);
      }
    }
  };
  const auto collecting = std::make_shared<Collecting>(futures.size());
  if (futures.empty()) collecting->finish();
  for (std::size_t i = 0; i < futures.size(); ++i) {
    futures[i].on_ready([collecting, i, future = futures[i]] {
      try {
        if constexpr (std::is_void_v<T>) {
          static_cast<void>(i);
          future.own().get();
        } else {
          collecting->values[i] = future.own().get();
        }
        if (--collecting->num_missing == 0) collecting->finish();
      } catch (...) {
        collecting->promise.try_set_error(std::current_exception());
      }
    });
  }
  return collecting->promise.future();
}

/// Waits for all futures, and returns their values in order. Throws the first error as soon as one of the
/// futures has it: the others are not waited for.
template <typename T>
Collected<T> wait_all(const std::vector<Future<T>>& futures) {
  return collect_all(futures).get();
}

}  // namespace cohort::rpc
