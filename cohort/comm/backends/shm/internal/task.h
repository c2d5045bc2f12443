#pragma once

#include <coroutine>
#include <cstdint>
#include <exception>
#include <utility>

/// A collective is written from top to bottom, and stops where it would wait:
///
///     Task barrier(Communicator& ranks) {
///       ranks.arrive(signature);
///       co_await ranks.everyone();        // advance() returns until all have arrived
///     }
namespace cohort::comm::shm {

/// What a task waits for. Lives in the task.
class Condition {
 public:
  /// Whether it holds. May throw: what the task then fails with.
  virtual bool ready() = 0;
  /// The ranks, a bit each, without which it cannot hold.
  virtual std::uint64_t waits_for() const = 0;
  /// Those of them that have begun the same collective: where no thread advances them, they can be asked to
  /// continue.
  virtual std::uint64_t can_be_asked() const { return 0; }

 protected:
  ~Condition() = default;
};

/// `co_await until(ranks, [&] { return ...; })`.
template <typename Ready>
class Until : public Condition {
 public:
  Until(std::uint64_t ranks, Ready ready) : ranks_(ranks), ready_(std::move(ready)) {}
  bool ready() override { return ready_(); }
  std::uint64_t waits_for() const override { return ranks_; }

 private:
  std::uint64_t ranks_;
  Ready ready_;
};
template <typename Ready>
Until<Ready> until(std::uint64_t ranks, Ready ready) {
  return {ranks, std::move(ready)};
}

/// A coroutine that begins suspended. Threads: one caller at a time.
class Task {
 public:
  struct promise_type {
    Condition* waits = nullptr;
    std::exception_ptr error;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    template <typename Condition>
    struct Awaiter {
      Condition condition;
      bool await_ready() { return condition.ready(); }
      void await_suspend(std::coroutine_handle<promise_type> handle) { handle.promise().waits = &condition; }
      void await_resume() {}
    };
    template <typename Condition>
    Awaiter<Condition> await_transform(Condition condition) {
      return {std::move(condition)};
    }
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  /// Runs until it is done (true) or has to wait (false). Throws: what the task threw.
  bool advance() {
    promise_type& promise = handle_.promise();
    while (!handle_.done()) {
      if (promise.waits != nullptr) {
        if (!promise.waits->ready()) return false;
        promise.waits = nullptr;
      }
      handle_.resume();
      if (promise.error) std::rethrow_exception(promise.error);
    }
    return true;
  }

  /// As its condition says; 0 when it waits for nobody.
  std::uint64_t waits_for() const {
    const Condition* waits = handle_.promise().waits;
    return waits == nullptr ? 0 : waits->waits_for();
  }
  std::uint64_t can_be_asked() const {
    const Condition* waits = handle_.promise().waits;
    return waits == nullptr ? 0 : waits->can_be_asked();
  }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

}  // namespace cohort::comm::shm
