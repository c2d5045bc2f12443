#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cohort/parallel/graph_boundary.h"

/// Copies of one module on several placements: docs/guide/parallel.md, "DataParallel".
namespace cohort::parallel {

/// A copy of a module for each placement, kept from step to step. Parameters of a copy are leaves of its own:
/// on the device that the module is on they share its memory, elsewhere refresh() brings the values over.
/// Gradients reach the module's own parameters, by DevicePart::source_of.
/// Ownership: shares `original`. Threads: one caller at a time.
class Replicas {
 public:
  /// Makes another module of the same structure; null: original->clone().
  using Make = std::function<std::shared_ptr<torch::nn::Module>()>;
  /// Pairs of a copy's parameter and the module's own that it stands for.
  using StandsFor = std::vector<std::pair<at::Tensor, at::Tensor>>;

  Replicas(std::shared_ptr<torch::nn::Module> original, const std::vector<base::Placement>& placements,
           Make make = nullptr);

  /// How many copies there may be; the functions below take 0 to num_placements() - 1.
  std::size_t num_placements() const { return workers_.size(); }
  /// The thread that copy `i` runs on.
  const std::shared_ptr<PlacementWorker>& worker(std::size_t i) const { return workers_.at(i); }
  /// What copy `i` is called: "replica 1 on cpu:1".
  const PartName& name(std::size_t i) const { return names_.at(i); }
  /// Copy `i`, which refresh() has made. Throws: std::out_of_range before.
  const std::shared_ptr<torch::nn::Module>& module(std::size_t i) const { return copies_.at(i).module; }
  /// DevicePart::source_of for copy `i`. Throws: as module().
  std::shared_ptr<const StandsFor> source_of(std::size_t i) const { return copies_.at(i).source_of; }

  /// Makes the first `count` copies equal to the module: parameters, buffers, training or evaluation. The
  /// first copy's buffers are the module's own, the others' are copies. What is not there yet is made;
  /// everything is made anew after the module got other parameters. Draws no random number that the program
  /// sees.
  /// Throws: UsageError naming a module that cannot be cloned, with the lines to write; or what differs
  /// between it and a module that `make` made.
  void refresh(std::size_t count);
  /// Gives the module the first copy's buffers, where they do not share memory.
  void keep_buffers();

 private:
  struct Copy {
    std::shared_ptr<torch::nn::Module> module;
    std::shared_ptr<StandsFor> source_of;
    std::vector<at::Tensor> buffers;
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
  };
  Copy make_copy() const;
  void refresh_copy(std::size_t i);

  std::shared_ptr<torch::nn::Module> original_;
  Make make_;
  std::vector<std::shared_ptr<PlacementWorker>> workers_;
  std::vector<PartName> names_;
  std::vector<at::Tensor> parameters_, buffers_;  // the module's, when the copies were made
  std::vector<Copy> copies_;
};

namespace replicas_detail {

/// The module that a holder, or a shared_ptr, refers to.
template <typename M>
auto pointer(const M& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}
/// The way back.
template <typename M>
M typed(const std::shared_ptr<torch::nn::Module>& module) {
  using Impl = typename std::remove_reference_t<decltype(pointer(std::declval<const M&>()))>::element_type;
  return M(std::dynamic_pointer_cast<Impl>(module));
}

}  // namespace replicas_detail
}  // namespace cohort::parallel
