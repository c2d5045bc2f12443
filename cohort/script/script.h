#pragma once

#include <array>
#include <atomic>
#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cohort/core/call.h"
#include "cohort/core/nested.h"
#include "cohort/script/file.h"
#include "cohort/script/function.h"

/// Script mode: a C++ function of tensors is recorded as it runs, and replayed without its C++:
/// docs/guide/script.md.
///
///     auto fast = script::script(model);               // or any callable on tensors
///     for (...) {
///       auto loss = criterion(fast(x), y);             // calls 1 and 2 are recorded, later ones replayed
///       loss.backward();                               // the backward too
///     }
///     std::cout << fast.explain();
///
/// From the third call under the same guards on the function's C++ runs in calls 3, 4, 8, 16, ... only, which
/// compare it with the replay (ScriptOptions::verify). In the others it does not: prints, counters and
/// branches in it are what they were. One whose forward is a single operator runs as ever
/// (ScriptOptions::min_operators).
namespace cohort::script {

namespace script_detail {

template <typename Fn>
void watch(const Fn& fn, ScriptOptions& options) {
  if constexpr (requires { std::shared_ptr<torch::nn::Module>(fn.ptr()); }) {
    options.modules().push_back(fn.ptr());
  } else if constexpr (std::convertible_to<Fn, std::shared_ptr<torch::nn::Module>>) {
    options.modules().push_back(fn);
  }
}

// A function of a fixed number of inputs, and its programs.
template <typename Fn, typename... Inputs>
class Typed {
 public:
  using Result = decltype(core::call(std::declval<Fn&>(), std::declval<const Inputs&>()...));
  static_assert(!std::is_void_v<Result>, "script::script: the function must return what it computed");

  Typed(std::shared_ptr<Fn> fn, const ScriptOptions& options)
      : fn_(std::move(fn)),
        function_(
            [fn = fn_](const Tensors& inputs) {
              return run(*fn, inputs, std::index_sequence_for<Inputs...>());
            },
            options) {}

  Result operator()(const Inputs&... inputs) {
    if constexpr (sizeof...(Inputs) == 1) {
      return on(std::span<const at::Tensor>((&inputs)..., 1), inputs...);  // it lies there already
    } else {
      return on(std::array<at::Tensor, sizeof...(Inputs)>{inputs...}, inputs...);
    }
  }
  Function& function() { return function_; }

 private:
  Result on(std::span<const at::Tensor> tensors, const Inputs&... inputs) {
    const auto entry = function_.find(tensors);
    if (entry == nullptr) return core::call(*fn_, inputs...);
    Function::Output results = function_.call(tensors, entry);
    if constexpr (std::same_as<Result, at::Tensor>) {
      return std::move(results.front());
    } else {
      return core::unflatten_tensors(Result(*static_cast<const Result*>(results.structure.get())), results);
    }
  }
  template <std::size_t... I>
  static Function::Output run(Fn& fn, const Tensors& inputs, std::index_sequence<I...>) {
    Result result = core::call(fn, inputs[I]...);
    if constexpr (std::same_as<Result, at::Tensor>) {
      return Tensors{std::move(result)};
    } else {
      Tensors tensors = core::flatten_tensors(std::as_const(result));
      core::visit_tensors(result, [](at::Tensor& tensor) { tensor.reset(); });
      return {std::move(tensors), std::make_shared<const Result>(std::move(result))};
    }
  }

  std::shared_ptr<Fn> fn_;
  Function function_;
};

}  // namespace script_detail

/// What script() returns: called as the function is, with tensors. Copies share their programs.
/// Threads: any, if the function itself allows it; each call has memory of its own.
template <typename Fn>
class Scripted {
 public:
  Scripted(Fn fn, ScriptOptions options)
      : fn_(std::make_shared<Fn>(std::move(fn))),
        options_(std::move(options)),
        state_(std::make_shared<State>()) {
    script_detail::watch(*fn_, options_);
  }

  /// Returns what the function returns, and bit for bit. Inputs: tensors. Results: what core/nested.h
  /// understands; lengths and numbers beside tensors are those of the recording.
  /// Throws: what the function throws; UsageError as Function::operator() says.
  template <std::same_as<at::Tensor>... Inputs>
  auto operator()(const Inputs&... inputs) {
    return typed<Inputs...>()(inputs...);
  }

  /// Says for each set of guards what was recorded, or why calls run eagerly.
  std::string explain() const {
    const std::lock_guard lock(state_->mutex);
    std::string text;
    for (const auto& [count, entry] : state_->typed) text += entry.function->explain();
    return text;
  }
  /// Writes the programs that need no gradient to a file for load(), for modules as they are now: file.h.
  /// Results keep their tensors; numbers and names beside them are not in it. Throws: as script::save().
  void save(const std::filesystem::path& path, const Metadata& metadata = {}) const {
    const std::lock_guard lock(state_->mutex);
    std::vector<const Cache*> caches;
    for (const auto& [count, entry] : state_->typed) caches.push_back(&entry.function->cache());
    ::cohort::script::save(path, caches, metadata);
  }
  /// Forgets all programs, so that the next calls record again.
  void clear() {
    const std::lock_guard lock(state_->mutex);
    for (auto& [count, entry] : state_->typed) entry.function->clear();
  }

 private:
  struct TypedFunction {
    std::shared_ptr<void> typed;
    Function* function;
  };
  struct State {
    std::mutex mutex;
    std::map<std::size_t, TypedFunction> typed;  // by the number of inputs; entries stay
    std::array<std::atomic<void*>, 8> few{};     // the same, found without a lock
  };

  template <typename... Inputs>
  script_detail::Typed<Fn, Inputs...>& typed() {
    using Typed = script_detail::Typed<Fn, Inputs...>;
    constexpr std::size_t kCount = sizeof...(Inputs);
    if constexpr (kCount < std::tuple_size_v<decltype(State::few)>) {
      if (void* found = state_->few[kCount].load(std::memory_order_acquire)) {
        return *static_cast<Typed*>(found);
      }
    }
    const std::lock_guard lock(state_->mutex);
    TypedFunction& entry = state_->typed[kCount];
    if (entry.typed == nullptr) {
      auto made = std::make_shared<Typed>(fn_, options_);
      entry = {made, &made->function()};
    }
    if constexpr (kCount < std::tuple_size_v<decltype(State::few)>) {
      state_->few[kCount].store(entry.typed.get(), std::memory_order_release);
    }
    return *static_cast<Typed*>(entry.typed.get());
  }

  std::shared_ptr<Fn> fn_;
  ScriptOptions options_;
  std::shared_ptr<State> state_;
};

/// Returns `fn`, a callable on tensors or a module (a holder, or a shared_ptr of it), that is recorded and
/// then replayed. Ownership: keeps fn, and a module's tensors. Throws: UsageError for options out of range,
/// at the first call.
template <typename Fn>
Scripted<std::decay_t<Fn>> script(Fn&& fn, ScriptOptions options = ScriptOptions()) {
  return Scripted<std::decay_t<Fn>>(std::forward<Fn>(fn), std::move(options));
}

}  // namespace cohort::script
