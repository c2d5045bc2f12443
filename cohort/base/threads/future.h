#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"

/// A result that another thread will have: a value, or what was thrown in its place. No LibTorch.
///
///     base::Promise<int> promise("the answer");
///     base::Future<int> future = promise.future();
///     std::thread([promise = std::move(promise)]() mutable { promise.run([] { return 42; }); }).detach();
///     int n = future.get(base::Deadline(30s));       // or throws what the function threw
///
/// base/threads/serial_queue.h and base/threads/thread_pool.h make futures of the functions that they run.
namespace cohort::base {

/// Each thread that begins to wait for a result calls it before it sleeps: it may bring the result about
/// itself. It comes back soon, and at once when `is_done()`: the result is there, or the wait's deadline has
/// passed. Does not throw.
using WaitHelper = std::function<void(const std::function<bool()>& is_done)>;

namespace future_detail {

// What a result shares with those who wait for it. It is set once.
class State {
 public:
  /// `what`, a literal or interned, names the result in messages.
  explicit State(const char* what, WaitHelper helper = nullptr) : what_(what), helper_(std::move(helper)) {}
  virtual ~State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const char* what() const { return what_; }
  bool done() const { return done_.load(std::memory_order_acquire); }
  /// Returns whether it was done before the deadline.
  virtual bool wait(Deadline deadline);
  void wait_or_throw(Deadline deadline);
  /// Nobody waits any more. False where it is done.
  bool abandon();
  bool claim() noexcept {
    return !is_claimed_.exchange(true);
  }  ///< true once: the caller is to set the result
  void claim_or_throw();
  void set(std::exception_ptr error);  ///< claim_or_throw() and finish()
  /// It is done: its value is there, or this error.
  void finish(std::exception_ptr error) noexcept;
  void on_ready(std::function<void()> fn);

 protected:
  /// For a message: "the answer on thread cpu:1, which is idle".
  virtual std::string description() const { return what_; }
  /// The future calls it under the mutex: once where it is abandoned, and when it is done.
  virtual void on_abandoned() noexcept {}
  virtual void on_done() noexcept {}
  bool is_abandoned() const { return is_abandoned_; }  // under the mutex

  std::mutex mutex_;

 private:
  const char* const what_;
  const WaitHelper helper_;
  std::atomic<bool> is_claimed_{false}, done_{false};
  std::condition_variable finished_;
  std::exception_ptr error_;  // written before done_
  bool is_abandoned_ = false;
  std::vector<std::function<void()>> callbacks_;  // under the mutex, until it is done
};

template <typename T, typename Base = State>
class ValueState : public Base {
 public:
  using Base::Base;
  template <typename Fn>
  void set_from(Fn&& fn) {
    value.emplace(std::invoke(std::forward<Fn>(fn)));
  }
  std::optional<T> value;
};
template <typename Base>
class ValueState<void, Base> : public Base {
 public:
  using Base::Base;
  template <typename Fn>
  void set_from(Fn&& fn) {
    std::invoke(std::forward<Fn>(fn));
  }
};

}  // namespace future_detail

/// A result that is not there yet. A copy is of the same result. Threads: any wait. Any number copy the
/// value, or one takes it.
template <typename T>
class Future {
 public:
  Future() = default;
  /// For those who make futures.
  template <typename Base>
  explicit Future(std::shared_ptr<future_detail::ValueState<T, Base>> state)
      : state_(state), value_([&]() -> std::optional<Value>* {
          if constexpr (std::is_void_v<T>) {
            return nullptr;
          } else {
            return &state->value;
          }
        }()) {}

  /// False for one that was made by default, and after get().
  bool valid() const { return state_ != nullptr; }
  /// Whether the result, or the error, is there: wait() would not block. Throws: UsageError if not valid().
  bool ready() const { return state().done(); }
  /// Returns whether it was there before the deadline. Throws: UsageError at once where this thread and the
  /// one of a SerialQueue would wait for each other; not where the deadline has passed already.
  bool wait(Deadline deadline) const { return state().wait(deadline); }
  /// Has `fn`, which must not throw, called once the result is there: by the thread that sets it, or by this
  /// one at once where it is there.
  void on_ready(std::function<void()> fn) const { state().on_ready(std::move(fn)); }
  /// Nobody waits any more: who computes it is late until it is there. False where it is there: get() says
  /// how.
  bool abandon() const { return state().abandon(); }
  /// Returns the value, once, or throws the error.
  /// Throws: TimeoutError that says what was waited for; the result is abandoned then. UsageError as wait(),
  /// and where the value was taken before, by this or by a copy.
  T get(Deadline deadline) {
    state().wait_or_throw(deadline);
    const auto state = std::exchange(state_, nullptr);
    if constexpr (!std::is_void_v<T>) {
      if (!value_->has_value()) throw_taken();
      return *std::exchange(*value_, std::nullopt);
    }
  }
  /// Returns a copy of the value, which stays for others, or throws the error. Throws: as get().
  T copy(Deadline deadline) const
    requires std::is_copy_constructible_v<T>
  {
    state().wait_or_throw(deadline);
    if (!value_->has_value()) throw_taken();
    return **value_;
  }

 private:
  using Value = std::conditional_t<std::is_void_v<T>, char, T>;

  [[noreturn]] static void throw_taken() {
    throw UsageError("base.future",
                     "a result was asked for that is not there: it was taken before, or none "
                     "was ever awaited");
  }
  future_detail::State& state() const {
    if (state_ == nullptr) throw_taken();
    return *state_;
  }

  std::shared_ptr<future_detail::State> state_;
  std::optional<Value>* value_ = nullptr;  // in *state_
};

/// Who sets a result. One that is destroyed without gives its future an error.
template <typename T>
class Promise {
 public:
  /// `what`, a literal or interned, names the result in messages.
  explicit Promise(const char* what, WaitHelper helper = nullptr)
      : state_(std::make_shared<future_detail::ValueState<T>>(what, std::move(helper))) {}
  ~Promise() {
    if (state_ == nullptr || !state_->claim()) return;
    state_->finish(std::make_exception_ptr(
        UsageError("base.future", concat(state_->what(), " will never come: its promise is gone"))));
  }
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&&) = delete;

  /// Returns a future of the result; each call gives another one of the same result, which one of them
  /// takes.
  Future<T> future() const { return Future<T>(state_); }

  /// Sets what `fn` returns or throws. Throws, as set() and set_error(): UsageError where it has been set.
  template <typename Fn>
  void run(Fn&& fn) {
    if (!try_run(std::forward<Fn>(fn))) state_->claim_or_throw();
  }
  /// Sets the result of a Promise<void>, which has no value.
  void set()
    requires std::is_void_v<T>
  {
    set_error(nullptr);
  }
  /// Null: it has its value.
  void set_error(std::exception_ptr error) { state_->set(std::move(error)); }

  /// For a result that several parties may set: the first one does. The others get false, and nothing is
  /// thrown. So a function of on_ready(), which must not throw, may call them. try_run() does not call `fn`
  /// then.
  template <typename Fn>
  bool try_run(Fn&& fn) {
    if (!state_->claim()) return false;
    std::exception_ptr error;
    try {
      state_->set_from(std::forward<Fn>(fn));
    } catch (...) {
      error = std::current_exception();
    }
    state_->finish(std::move(error));
    return true;
  }
  bool try_set()
    requires std::is_void_v<T>
  {
    return try_set_error(nullptr);
  }
  bool try_set_error(std::exception_ptr error) {
    if (!state_->claim()) return false;
    state_->finish(std::move(error));
    return true;
  }

 private:
  std::shared_ptr<future_detail::ValueState<T>> state_;
};

}  // namespace cohort::base
