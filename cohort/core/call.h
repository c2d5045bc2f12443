#pragma once

#include <functional>

namespace cohort::core {

/// Whether `fn` is a module holder, or a pointer to a module, whose forward takes these inputs.
template <typename Fn, typename... Inputs>
concept HoldsModule = requires(Fn& fn, const Inputs&... inputs) { fn->forward(inputs...); };

/// Returns what a module, or any other callable, makes of its inputs. A holder's own operator() returns
/// nothing where forward is a template, as torch::nn::Sequential's is.
template <typename Fn, typename... Inputs>
auto call(Fn& fn, const Inputs&... inputs) {
  if constexpr (HoldsModule<Fn, Inputs...>) {
    return fn->forward(inputs...);
  } else {
    return std::invoke(fn, inputs...);
  }
}

}  // namespace cohort::core
