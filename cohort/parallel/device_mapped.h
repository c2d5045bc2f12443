#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "cohort/parallel/graph_boundary.h"
#include "cohort/parallel/replicas.h"

/// A model whose parts are on several placements: docs/guide/parallel.md, "Model parallel".
namespace cohort::parallel {

/// A module that lives on a placement: its parameters are on the placement's device, and each call runs
/// forward and backward on the placement's thread, with inputs brought there. The result stays there.
///
///     struct ToyModelImpl : torch::nn::Module {
///       ToyModelImpl()
///           : net1(register_module("net1", torch::nn::Linear(10, 10)), base::Placement::parse("cpu:0")),
///             net2(register_module("net2", torch::nn::Linear(10, 5)), base::Placement::parse("cpu:1")) {}
///       at::Tensor forward(const at::Tensor& x) { return net2.forward(torch::relu(net1.forward(x))); }
///       parallel::DeviceMapped<torch::nn::Linear> net1, net2;
///     };
///
/// M: a module holder or a shared_ptr to a module, of any kind. Registered as usual, it keeps the names of
/// its parameters, and state dicts stay as they are; optimizers take parameters on several devices.
/// Ownership: shares the module. Threads: one caller at a time. Throws: as run_on_devices.
template <typename M>
class DeviceMapped {
 public:
  /// Moves the module's parameters and buffers to the placement's device.
  DeviceMapped(M module, const base::Placement& placement, BoundaryOptions options = {})
      : module_(std::move(module)),
        worker_(PlacementWorker::of(placement)),
        name_(replicas_detail::pointer(module_)->name() + " on " + placement.name),
        options_(std::move(options)) {
    ptr()->to(worker_->device());
  }

  /// Runs the module on its placement's thread, with inputs brought there; the result stays there. Throws:
  /// as run_on_devices().
  template <typename... Args>
  auto forward(Args... args) {
    return run(name_, worker_, options_, module_, std::move(args)...);
  }
  template <typename... Args>
  auto operator()(Args... args) {
    return forward(std::move(args)...);
  }

  /// The module itself, as it was given.
  M& module() { return module_; }
  /// The module as torch::nn::Module: for its parameters and buffers.
  std::shared_ptr<torch::nn::Module> ptr() const { return replicas_detail::pointer(module_); }
  auto operator->() { return replicas_detail::pointer(module_).get(); }
  /// Where it runs, and where its parameters are.
  const base::Placement& placement() const { return worker_->placement(); }

 private:
  M module_;
  std::shared_ptr<PlacementWorker> worker_;
  PartName name_;
  BoundaryOptions options_;
};

/// Puts modules within `model` on placements, by name ("0", "layer4.1"); what is not named runs where it is
/// called. Names of parameters stay. Possible where nobody calls the module by its type: children of
/// torch::nn::Sequential, and those that Cohort's models and others keep as core::AnyLayer; of a module that
/// is called by its type but is itself such a container (layer4 of a ResNet) every child is placed.
/// Returns how many modules were placed.
/// Throws: UsageError for a name that is not there, or a module that is called by its type, with the lines to
/// write; nothing is placed then.
std::int64_t apply_device_map(torch::nn::Module& model,
                              const std::map<std::string, base::Placement>& placements);

}  // namespace cohort::parallel
