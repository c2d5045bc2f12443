#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <concepts>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/core/call.h"
#include "cohort/core/nested.h"

/// Recomputation, also called activation checkpointing: memory of a forward is given up and bought back with
/// a second run of it in backward.
///
///     auto y = autograd::recompute(block, x);   // a module of one tensor
///     auto [a, b] = autograd::recompute(        // anything of nested.h
///         [&](const at::Tensor& x, const Mask& m) { return layer->both(x, m); }, x, mask);
///
/// Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
namespace cohort::autograd {

class RunScope;

/// How a recomputed part differs from a plain one.
struct RecomputeOptions {
  /// The second run draws the random numbers of the first. On the CPU its operators draw from copies of
  /// generators. Where fn seeds LibTorch's global generator, or draws from it on a thread of its own, fn runs
  /// a third time, with that generator set for the time of the run. So it does where other threads draw from
  /// that generator meanwhile, which cannot be told apart: they draw some numbers twice. The default
  /// generator of each GPU that an input is on is set, too. Warns once where fn drew other numbers all the
  /// same: docs/guide/autograd.md.
  bool preserve_rng_state = true;
  /// Tensors that fn changes as it runs, such as the running statistics of batch norm: the second run leaves
  /// them as it finds them. The buffers of an fn that is a module (a ModuleHolder) need not be named.
  std::vector<at::Tensor> buffers = {};
};

namespace recompute_detail {

using Tensors = std::vector<at::Tensor>;
/// fn on these tensors in the places of its inputs' own: the tensors of its result.
using Run = std::function<Tensors(std::span<const at::Tensor>)>;

/// The two runs of one call, without their types: see recompute.cpp.
class Runs {
 public:
  struct State;
  Runs(RecomputeOptions options, Tensors inputs);
  ~Runs();
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;
  /// What the first run gets: the inputs, cut off from their graphs.
  const Tensors& leaves() const;
  /// Ends the first run: its results, as results of one node that calls `again` in backward.
  Tensors attach(const Tensors& results, Run again);

 private:
  c10::intrusive_ptr<State> state_;
  std::unique_ptr<RunScope> first_run_;
};

template <typename Fn, typename... Inputs>
concept Runnable = core::HoldsModule<Fn, Inputs...> || std::invocable<Fn&, const Inputs&...>;

template <typename Fn, typename... Inputs>
struct RecomputedCall {
  Fn fn;
  std::tuple<Inputs...> inputs;

  auto operator()(std::span<const at::Tensor> tensors) {
    std::size_t place = 0;
    core::visit_tensors(inputs, [&](at::Tensor& tensor) { tensor = tensors[place++]; });
    // The tensors leave with the call, so that only the node holds them, and only until backward.
    struct Blank {
      std::tuple<Inputs...>& inputs;
      ~Blank() {
        core::visit_tensors(inputs, [](at::Tensor& tensor) { tensor.reset(); });
      }
    } blank{inputs};
    return std::apply([this](const Inputs&... each) { return core::call(fn, each...); },
                      std::as_const(inputs));
  }
};

}  // namespace recompute_detail

/// Returns fn(inputs...), of which backward keeps the inputs only: it runs fn again and goes back through
/// that run. Values, gradients and the hooks of parameters are what they are without it; what is saved for
/// backward within fn lives during one of the two runs.
/// Inputs and results: whatever nested.h understands, handed to fn as const references. fn may capture
/// parameters, and whatever needs no gradient; a tensor with a graph of its own must be an input.
/// The second run has the autocast state of the first. With gradients off it is a plain call.
/// Ownership: keeps fn and the inputs as long as the result's graph; what fn refers to must live until
/// backward. Threads: fn runs again on the thread that runs backward, beside other second runs, and beside
/// other calls where these change no buffers that it changes. Calls may be nested.
/// Throws: UsageError where fn changes an input in place or reaches a graph that is not an input's; in
/// backward where it is one with create_graph, where a parameter was changed since, or where the second run's
/// results differ in number, shape or type, or it does not use the same parameters.
template <typename Fn, typename... Inputs>
  requires recompute_detail::Runnable<Fn, Inputs...>
auto recompute(RecomputeOptions options, Fn fn, Inputs... inputs) {
  using Result = decltype(core::call(fn, std::as_const(inputs)...));
  static_assert(!std::is_void_v<Result>, "autograd::recompute: fn must return what was computed");
  if (!at::GradMode::is_enabled()) return core::call(fn, std::as_const(inputs)...);
  if constexpr (requires { fn->buffers(); }) {
    for (const at::Tensor& buffer : fn->buffers()) options.buffers.push_back(buffer);
  }
  using RecomputedCall = recompute_detail::RecomputedCall<Fn, Inputs...>;
  auto call = std::make_shared<RecomputedCall>(
      RecomputedCall{std::move(fn), std::tuple<Inputs...>(std::move(inputs)...)});
  recompute_detail::Runs runs(std::move(options), core::flatten_tensors(call->inputs));
  Result result = (*call)(runs.leaves());
  const auto tensors =
      runs.attach(core::flatten_tensors(result), [call](std::span<const at::Tensor> inputs_again) {
        return core::flatten_tensors(static_cast<const Result&>((*call)(inputs_again)));
      });
  return core::unflatten_tensors(std::move(result), tensors);
}

/// As above, with the options' defaults.
template <typename Fn, typename... Inputs>
  requires recompute_detail::Runnable<Fn, Inputs...>
auto recompute(Fn fn, Inputs... inputs) {
  return recompute(RecomputeOptions(), std::move(fn), std::move(inputs)...);
}

}  // namespace cohort::autograd
