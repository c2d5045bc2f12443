#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "cohort/script/options.h"
#include "cohort/script/tensors.h"

namespace cohort::script {

class Cache;
class CacheEntry;
class Program;
struct GradOutputWants;

/// A function of tensors that is recorded and then replayed, forward and backward: what Scripted is made of.
/// Threads: any, if the function allows it.
class Function {
 public:
  /// Tensors, and what stands beside them in the result: a copy of it without tensors, or null.
  struct Output : Tensors {
    using Tensors::Tensors;
    Output(Tensors tensors, std::shared_ptr<const void> beside = nullptr)  // NOLINT: as a list of tensors
        : Tensors(std::move(tensors)), structure(std::move(beside)) {}
    std::shared_ptr<const void> structure;
  };
  /// The function itself.
  using Run = std::function<Output(const Tensors& inputs)>;
  Function(Run run, ScriptOptions options);
  ~Function();
  Function(const Function&) = delete;
  Function& operator=(const Function&) = delete;

  /// Returns run(inputs), or what its program computes. With gradients on, the results are those of one node
  /// of the graph, whose edges go to inputs and captured parameters.
  /// Throws: what run() throws; in backward UsageError for create_graph, for a tensor that backward reads and
  /// that was changed in place since, and for a second backward without retain_graph.
  Tensors operator()(const Tensors& inputs);

  /// The two halves of a call, for a caller that can run the function itself: finds what is known about calls
  /// with these inputs, null where the function is to be run as it is; and then calls.
  std::shared_ptr<CacheEntry> find(std::span<const at::Tensor> inputs);
  Output call(std::span<const at::Tensor> inputs, const std::shared_ptr<CacheEntry>& entry);

  /// Says what was recorded under which guards, and why calls run eagerly.
  std::string explain() const;
  /// Forgets all recordings and programs: the next call records.
  void clear();
  /// What is known about calls so far.
  const Cache& cache() const { return *cache_; }

 private:
  // `verified`: the program that the call is to be compared with, or null.
  Output record(const Tensors& inputs, const std::shared_ptr<CacheEntry>& entry,
                const std::shared_ptr<const Program>& verified);

  std::shared_ptr<const Run> run_;
  const std::unique_ptr<Cache> cache_;
  const std::shared_ptr<GradOutputWants> wants_;
};

}  // namespace cohort::script
