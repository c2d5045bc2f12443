#pragma once

#include <chrono>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/future.h"
#include "cohort/core/call.h"
#include "cohort/core/nested.h"
#include "cohort/script/tensors.h"

/// Independent parts of a function on other cores: docs/guide/script.md, "Parts side by side".
///
///     auto left = script::fork(branch, x);                   // a module, or any callable on tensors
///     auto right = script::fork([&](const at::Tensor& t) { return other->forward(t); }, x);
///     at::Tensor y = script::wait(left) + script::wait(right);
namespace cohort::script {

/// How long wait() waits by default.
inline constexpr std::chrono::milliseconds kForkTimeout = std::chrono::minutes(10);

/// A function of tensors that runs on another thread: what Future is made of.
class ForkedPart {
 public:
  /// What the part computes, on whichever thread.
  using Run = std::function<Tensors(const Tensors& inputs)>;
  /// Which graph its results have.
  enum class Graph : std::uint8_t {
    kAsCaller,  ///< its own, which wait() joins to the caller's, where gradients are enabled
    kNone,      ///< what it runs is below autograd
  };
  ForkedPart(Run run, Tensors inputs, Graph graph = Graph::kAsCaller);
  /// A part that has not begun never runs; one that runs is waited for, as it may use what goes out of scope
  /// (not after a TimeoutError said that it is stuck).
  ~ForkedPart();
  ForkedPart(ForkedPart&&) noexcept;
  ForkedPart& operator=(ForkedPart&&) = delete;

  /// Returns the results, once. Throws: what the part threw; TimeoutError, after which one may wait again;
  /// UsageError the second time.
  Tensors wait(base::Deadline deadline);
  /// Waits, and returns whether it has ended, well or not. Not after wait() has taken the result.
  bool ends_by(base::Deadline deadline);

 private:
  struct Task;
  std::shared_ptr<Task> task_;
  base::Future<void> on_pool_;  // not valid where it was recorded
  bool is_late_ = false;        // somebody's deadline passed while it ran
};

/// What a forked function will have returned. Threads: one caller at a time.
template <typename Result>
class Future {
 public:
  Future(ForkedPart part, std::shared_ptr<std::optional<Result>> result)
      : part_(std::move(part)), result_(std::move(result)) {}

  /// As script::wait().
  Result get(base::Deadline deadline) {
    const Tensors tensors = part_.wait(deadline);
    return core::unflatten_tensors(std::move(**result_), tensors);
  }

 private:
  ForkedPart part_;
  std::shared_ptr<std::optional<Result>> result_;
};

/// Has another thread run fn(inputs...), and returns at once. As many run at the same time as there are
/// usable cores, each with one thread; further ones wait for a core. Within a function that is being recorded
/// fn runs here and now, with one thread too, and is recorded; a replay runs it on another thread again.
/// Results: what core/nested.h understands.
/// fn finds the gradient mode, inference mode and autocast of whoever forked it. It may use parameters; a
/// tensor with a graph of its own must be an input, and what it captures by reference must live until
/// wait(). Its backward runs on the thread that calls backward. It must not draw random numbers, but from a
/// core::RandomScope that it opens itself: threads would decide their order, and wait() throws.
template <typename Fn, std::same_as<at::Tensor>... Inputs>
auto fork(Fn&& fn, const Inputs&... inputs) {
  using Result = decltype(core::call(std::declval<std::decay_t<Fn>&>(), inputs...));
  static_assert(!std::is_void_v<Result>, "script::fork: the function must return what it computed");
  auto result = std::make_shared<std::optional<Result>>();
  const auto run = []<std::size_t... I>(auto& callee, const Tensors& tensors, std::index_sequence<I...>) {
    return core::call(callee, tensors[I]...);
  };
  ForkedPart part(
      [fn = std::decay_t<Fn>(std::forward<Fn>(fn)), result, run](const Tensors& tensors) mutable {
        result->emplace(run(fn, tensors, std::index_sequence_for<Inputs...>()));
        return core::flatten_tensors(std::as_const(**result));
      },
      Tensors{inputs...});
  return Future<Result>(std::move(part), std::move(result));
}

/// Returns what the forked function returned, once; gradients go through it into inputs and parameters.
/// Throws: what it threw; TimeoutError, after which one may wait again; UsageError the second time.
template <typename Result>
Result wait(Future<Result>& future, base::Deadline deadline = base::Deadline(kForkTimeout)) {
  return future.get(deadline);
}
/// The same for a future that nobody keeps.
template <typename Result>
Result wait(Future<Result>&& future, base::Deadline deadline = base::Deadline(kForkTimeout)) {
  return future.get(deadline);
}

}  // namespace cohort::script
