#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/core/device.h"
#include "cohort/parallel/replicas.h"

/// One module on several placements of one process, a part of the batch on each: docs/guide/parallel.md.
namespace cohort::parallel {

/// How a DataParallel cuts batches, and where its parts run.
struct DataParallelOptions {
  /// Where replicas run, in the order of the batch's parts; empty: a plain call of the module.
  std::vector<base::Placement> device_ids = {};
  /// Where the joined result is; none: the first of device_ids.
  std::optional<base::Placement> output_device = std::nullopt;
  /// Along which inputs are cut and results joined.
  std::int64_t dim = 0;
  /// How long one replica's forward, or backward, may take.
  std::chrono::milliseconds timeout = kPlacementTimeout;
};

namespace data_parallel_detail {

/// How many parts `tensors` are cut into: at most `most`, as torch.chunk counts. Throws: UsageError.
std::size_t num_chunks(const Tensors& tensors, std::size_t most, std::int64_t dim);
/// Part `index` of `count`; a tensor without dimensions whole.
at::Tensor chunk(const at::Tensor& tensor, std::size_t index, std::size_t count, std::size_t most,
                 std::int64_t dim);
/// What was found at one place of every replica's result, as one.
at::Tensor join(const Tensors& tensors, std::int64_t dim, c10::Device device);
BoundaryOptions boundary_options(const torch::nn::Module& module, const DataParallelOptions& options);

}  // namespace data_parallel_detail

/// Cuts every tensor of `inputs` along `dim` into parts of equal size, the last ones smaller or missing, as
/// torch.chunk does; returns inputs of which each has its part, on the placements' devices. Tensors without
/// dimensions, numbers and strings go to all. Views where the device is the same.
/// Throws: UsageError where tensors are cut into different numbers of parts.
template <typename Inputs>
std::vector<Inputs> scatter(const Inputs& inputs, const std::vector<base::Placement>& placements,
                            std::int64_t dim = 0) {
  const Tensors tensors = core::flatten_tensors(inputs);
  const std::size_t count = data_parallel_detail::num_chunks(tensors, placements.size(), dim);
  std::vector<Inputs> parts;
  for (std::size_t i = 0; i < count; ++i) {
    const c10::Device device = core::device_of(placements[i]);
    parts.push_back(core::map_tensors(inputs, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return core::to_device(data_parallel_detail::chunk(tensor, i, count, placements.size(), dim), device,
                             /*non_blocking=*/true);
    }));
  }
  return parts;
}

/// Joins results along `dim` on the output's device; those without dimensions (losses) become one tensor [n].
/// Numbers and strings are the first's. Throws: UsageError where the results differ in structure.
template <typename Result>
Result gather(const std::vector<Result>& results, const base::Placement& output, std::int64_t dim = 0) {
  const c10::Device device = core::device_of(output);
  std::vector<Tensors> places;
  for (const at::Tensor& tensor : core::flatten_tensors(results.front())) places.push_back({tensor});
  for (std::size_t i = 1; i < results.size(); ++i) {
    std::size_t place = 0;
    core::zip_tensors(results.front(), results[i], [&](const at::Tensor&, const at::Tensor& tensor) {
      places[place++].push_back(tensor);
    });
  }
  Tensors joined;
  for (const Tensors& tensors : places) joined.push_back(data_parallel_detail::join(tensors, dim, device));
  return core::unflatten_tensors(results.front(), joined);
}

/// Copies of `module` for the placements, refreshed; parallel_apply runs them.
template <typename M>
Replicas replicate(const M& module, const std::vector<base::Placement>& placements) {
  Replicas replicas(replicas_detail::pointer(module), placements);
  replicas.refresh(placements.size());
  return replicas;
}

/// Returns what each replica of an M returns for its inputs, a tuple of arguments; all run at the same time,
/// and so do their backwards. Replicas beyond inputs.size() rest. As run_on_devices().
template <typename M, typename... Args>
auto parallel_apply(const Replicas& replicas, std::vector<std::tuple<Args...>> inputs,
                    const BoundaryOptions& options = {}) {
  using Typed = boundary_detail::TypedPart<M, Args...>;
  std::vector<Typed> typed;
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    typed.emplace_back(replicas.name(i), replicas.worker(i), replicas_detail::typed<M>(replicas.module(i)),
                       std::move(inputs[i]));
    parts.push_back(std::move(typed.back().part()));
    parts.back().source_of = replicas.source_of(i);
  }
  const auto tensors = run_on_devices(std::move(parts), options);
  std::vector<typename Typed::Result> results;
  for (std::size_t i = 0; i < typed.size(); ++i) results.push_back(typed[i].result(tensors[i]));
  return results;
}
/// The same of modules that are not copies of one; gradients are each module's own.
template <typename M, typename... Args>
auto parallel_apply(std::vector<M> modules, std::vector<std::tuple<Args...>> inputs,
                    const std::vector<base::Placement>& placements, const BoundaryOptions& options = {}) {
  using Typed = boundary_detail::TypedPart<M, Args...>;
  std::vector<Typed> typed;
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const PartName name(base::concat("module ", i, " on ", placements.at(i).name));
    typed.emplace_back(name, PlacementWorker::of(placements[i]), modules.at(i), std::move(inputs[i]));
    parts.push_back(std::move(typed.back().part()));
  }
  const auto tensors = run_on_devices(std::move(parts), options);
  std::vector<typename Typed::Result> results;
  for (std::size_t i = 0; i < typed.size(); ++i) results.push_back(typed[i].result(tensors[i]));
  return results;
}

/// Wraps a module so that each forward cuts the batch along `dim`, runs a replica on each placement with its
/// part, and joins the results; backward runs all replicas' backwards at once and leaves the sum of their
/// gradients with the module's own parameters, as if one device had the whole batch.
///
///     parallel::DataParallel<Net> model(net, {.device_ids = base::parse_placements("cpu:0,cpu:1")});
///     auto loss = torch::mse_loss(model.forward(x), y);
///     loss.backward();                              // net->parameters() have their gradients
///
/// M: a module holder or a shared_ptr to a module that can be cloned: torch::nn::Cloneable, Sequential,
/// Cohort's models; or with a factory. Arguments and results: whatever core/nested.h understands. A batch of
/// fewer parts than placements uses the first ones. Random operators draw from (the caller's generator,
/// replica). Batch norm in training uses each replica's own part; running statistics are the first one's.
/// Ownership: shares the module, whose parameters replicas share on the same device. Threads: one caller.
/// Throws: as Replicas::refresh and run_on_devices; errors have "replica 1 on cpu:1".
template <typename M>
class DataParallel {
 public:
  explicit DataParallel(M module, DataParallelOptions options = {}, std::function<M()> factory = nullptr)
      : module_(std::move(module)), options_(std::move(options)) {
    if (options_.device_ids.empty()) return;
    Replicas::Make make;
    if (factory) make = [factory] { return replicas_detail::pointer(factory()); };
    replicas_ = std::make_shared<Replicas>(ptr(), options_.device_ids, std::move(make));
  }

  /// Cuts each tensor of `args`, runs the replicas on their parts at the same time, and returns their
  /// results joined along dimension options().dim, on the output device. Throws: what scatter(), a replica
  /// and gather() throw.
  template <typename... Args>
  auto forward(Args... args) {
    using Result = decltype(core::call(module_, std::as_const(args)...));
    if (!replicas_) return core::call(module_, std::as_const(args)...);
    auto inputs = scatter(std::tuple<Args...>(std::move(args)...), options_.device_ids, options_.dim);
    replicas_->refresh(inputs.size());
    std::vector<Result> results = parallel_apply<M>(*replicas_, std::move(inputs),
                                                    data_parallel_detail::boundary_options(*ptr(), options_));
    replicas_->keep_buffers();
    const base::Placement& output = options_.output_device ? *options_.output_device : options_.device_ids[0];
    if (options_.device_ids.size() == 1) {
      return core::to_device(std::move(results.front()), core::device_of(output));
    }
    return gather(results, output, options_.dim);
  }
  template <typename... Args>
  auto operator()(Args... args) {
    return forward(std::move(args)...);
  }

  /// The module itself: its parameters have their own names.
  M& module() { return module_; }
  /// With operator->, what lets DistributedDataParallel hold this in the place of a module.
  std::shared_ptr<torch::nn::Module> ptr() const { return replicas_detail::pointer(module_); }
  DataParallel* operator->() { return this; }
  const DataParallelOptions& options() const { return options_; }

 private:
  M module_;
  DataParallelOptions options_;
  std::shared_ptr<Replicas> replicas_;
};

/// DataParallel for one call: replicas are made, used and dropped.
template <typename M, typename... Args>
auto data_parallel(M module, DataParallelOptions options, Args... args) {
  return DataParallel<M>(std::move(module), std::move(options)).forward(std::move(args)...);
}

}  // namespace cohort::parallel
