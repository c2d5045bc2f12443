#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/parallel/parameters.h"
#include "cohort/parallel/reducer_options.h"
#include "cohort/parallel/step_info.h"

/// Gradients averaged over ranks while backward runs: docs/guide/distributed.md.
namespace cohort::parallel {

/// Makes every rank's gradients the mean over ranks, a bucket at a time, while backward runs.
///
///     parallel::Reducer reducer(group, parallel::parameters_to_reduce(*model));
///     auto loss = loss_of(model->forward(x));
///     reducer.prepare();                     // the next backward reduces
///     loss.backward();                       // returns when all gradients are averaged
///
/// Shapes: a bucket is a flat [n], n = sum of numel, one type and device.
/// Collective: constructor, the backward after prepare(), and finish(), on every rank in the same order.
/// prepare() is not: nothing travels before the backward. It may stand between another forward and its
/// backward. Buckets are reduced in the order of their index on every rank, whatever the order of gradients.
///
/// Ownership: shares the group and the parameters; keeps the buckets, which are the gradients where these are
/// views. Hooks on the parameters go with it. Threads: one caller at a time; hooks run where autograd does.
///
/// Throws, also out of backward(): UsageError for what it cannot reduce, naming the parameter; what Group
/// throws. After a failure nothing is reduced any more.
///
/// Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2; differs in that sizes come from measured
/// times, and that ranks weigh by their samples.
class Reducer {
 public:
  /// Throws: UsageError naming the first parameter, shape, stride or type in which ranks differ.
  Reducer(comm::Group group, std::vector<NamedParameter> parameters, const ReducerOptions& options = {});
  /// Waits for what is under way.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// What else travels between the ranks with each reduction, on all of them.
  struct Companion {
    std::function<void()> begin;  ///< before the first bucket travels
    std::function<void()> end;    ///< when all have
  };
  /// Has `companion` called in each reduction from now on, in place of the one before.
  void set_companion(Companion companion);

  /// Has the next backward reduce: gradients become their mean over ranks. `outputs`: what the loss is made
  /// of, for find_unused_parameters and static_graph.
  /// Throws: UsageError when the backward before left parameters without a gradient, naming them.
  void prepare(std::span<const at::Tensor> outputs = {});
  /// The same with a weight: sum_r(weight_r g_r) / sum_r(weight_r). Where the weights are all 0, or a rank's
  /// numbers are not finite, the next backward reduces nothing.
  void prepare(const StepInfo& info, std::span<const at::Tensor> outputs = {});

  /// Whether prepare() was called, and finish() not yet after it.
  bool is_prepared() const;

  /// Says what was done since prepare(). Where there was no backward, as on a rank without samples, or where
  /// it may leave parameters out, what is left is reduced now, as it stands. Blocks until all is reduced.
  /// Throws: UsageError naming what a backward left out that may not; while a NoSync lives.
  ReduceReport finish();

  /// While it lives, backwards add up gradients on this rank alone; the first prepared one after it reduces
  /// their sum.
  class NoSync {
   public:
    explicit NoSync(Reducer& reducer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Reducer& reducer_;
  };
  /// Whether a NoSync lives.
  bool is_silent() const;

  /// The ranks that it reduces over.
  const comm::Group& group() const;
  /// Names of the parameters of each bucket, in the order of reduction.
  std::vector<std::vector<std::string>> buckets() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // hooks that outlive this find it gone
};

}  // namespace cohort::parallel
