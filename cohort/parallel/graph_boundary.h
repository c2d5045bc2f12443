#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/autograd/detached_graph.h"
#include "cohort/core/call.h"
#include "cohort/core/nested.h"
#include "cohort/core/random_scope.h"
#include "cohort/parallel/placement_worker.h"

/// Parts of a graph that run forward and backward on the threads of their placements: docs/guide/parallel.md,
/// "The graph boundary".
namespace cohort::parallel {

using Tensors = std::vector<at::Tensor>;

/// How parts run, and how long they may.
struct BoundaryOptions {
  /// How long one part's forward, or backward, may take.
  std::chrono::milliseconds timeout = kPlacementTimeout;
  /// What random operators of part i draw from, with RandomKey::part i; none: for several parts a key that is
  /// drawn from the caller's generator, for one that generator itself.
  std::optional<core::RandomKey> random = std::nullopt;
};

/// What a part is called in the timeline and in messages. Made once, as its texts live for ever.
struct PartName {
  explicit PartName(const std::string& name);
  const char* name;      ///< "replica 1 on cpu:1"
  const char* forward;   ///< "replica 1 on cpu:1 forward"
  const char* backward;  ///< "replica 1 on cpu:1 backward"
};

/// One part: a function of tensors and where it runs.
struct DevicePart {
  /// What the part is called.
  PartName name;
  /// Whose thread and device it runs on; may be that of other parts too.
  std::shared_ptr<PlacementWorker> worker;
  /// Handed to `run` in their order, on the placement's device.
  Tensors inputs;
  /// Runs on the worker. What it captures lives as long as it does.
  std::function<Tensors(const Tensors& inputs)> run;
  /// Leaves that `run` uses, and whose gradient is another tensor's: a replica's parameters.
  std::shared_ptr<const std::vector<std::pair<at::Tensor, at::Tensor>>> source_of = nullptr;
};

/// Returns each part's results, of which backward runs every part's own backward on its worker, all at the
/// same time. Gradients of parameters that several parts use are added in a fixed order, on the workers, and
/// continue in the graph of whoever called this: into grad(), through hooks, to what torch::autograd::grad()
/// asked for. Inputs with a graph get theirs. With gradients off it is a plain call on the workers.
/// Results stay on their placement's device.
/// Throws: what a part threw, with the part's name, once all have ended (the first in their order);
/// TimeoutError naming the part; in backward also UsageError where it is one with create_graph.
std::vector<Tensors> run_on_devices(std::vector<DevicePart> parts, const BoundaryOptions& options = {});

namespace boundary_detail {

// A part of any types: its tensors go through DevicePart, all else stays here.
template <typename Fn, typename... Inputs>
class TypedPart {
 public:
  using Result = decltype(core::call(std::declval<Fn&>(), std::declval<const Inputs&>()...));
  static_assert(!std::is_void_v<Result>, "a part must return what it computed");

  TypedPart(PartName name, std::shared_ptr<PlacementWorker> worker, Fn fn, std::tuple<Inputs...> inputs)
      : state_(std::make_shared<State>(State{std::move(fn), std::move(inputs), std::nullopt})),
        part_{name, std::move(worker), core::flatten_tensors(state_->inputs), nullptr} {
    part_.run = [state = state_](const Tensors& tensors) {
      std::size_t place = 0;
      core::visit_tensors(state->inputs, [&](at::Tensor& tensor) { tensor = tensors[place++]; });
      state->result.emplace(std::apply(
          [&](const Inputs&... each) -> Result { return core::call(state->fn, each...); }, state->inputs));
      Tensors results = core::flatten_tensors(std::as_const(*state->result));
      core::visit_tensors(state->inputs, [](at::Tensor& tensor) { tensor.reset(); });
      return results;
    };
  }

  DevicePart& part() { return part_; }
  Result result(const Tensors& tensors) {
    return core::unflatten_tensors(std::move(*state_->result), tensors);
  }

 private:
  struct State {
    Fn fn;
    std::tuple<Inputs...> inputs;
    std::optional<Result> result;
  };
  std::shared_ptr<State> state_;
  DevicePart part_;
};

}  // namespace boundary_detail

/// Returns fn(inputs...), run forward and backward on a placement's thread; the result stays on its device.
///
///     at::Tensor y = parallel::run(base::Placement::parse("cpu:1"), net, x);            // a module
///     auto [a, b] = parallel::run(worker, [=](const at::Tensor& t) { return net->both(t); }, x);
///
/// Inputs and results: whatever nested.h understands. fn may use parameters, of any device; a tensor with a
/// graph of its own must be an input. As run_on_devices().
template <typename Fn, typename... Inputs>
auto run(const PartName& name, std::shared_ptr<PlacementWorker> worker, const BoundaryOptions& options, Fn fn,
         Inputs... inputs) {
  boundary_detail::TypedPart<Fn, Inputs...> typed(name, std::move(worker), std::move(fn),
                                                  std::tuple<Inputs...>(std::move(inputs)...));
  std::vector<DevicePart> parts;
  parts.push_back(std::move(typed.part()));
  return typed.result(run_on_devices(std::move(parts), options).front());
}
/// The same with the default options, under the name "a part on PLACEMENT".
template <typename Fn, typename... Inputs>
auto run(std::shared_ptr<PlacementWorker> worker, Fn fn, Inputs... inputs) {
  const PartName name("a part on " + worker->placement().name);
  return run(name, std::move(worker), BoundaryOptions(), std::move(fn), std::move(inputs)...);
}
/// The same on the placement's worker: PlacementWorker::of().
template <typename Fn, typename... Inputs>
auto run(const base::Placement& placement, Fn fn, Inputs... inputs) {
  return run(PlacementWorker::of(placement), std::move(fn), std::move(inputs)...);
}

}  // namespace cohort::parallel
