#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/pipeline/internal/channel.h"
#include "cohort/pipeline/internal/serialized_execution.h"
#include "cohort/pipeline/internal/stage_run.h"
#include "cohort/pipeline/options.h"

/// One run of a plan: what the threads of the placements share. Internal to Pipeline.
namespace cohort::pipeline {

/// What does not change from run to run.
struct Setup {
  std::vector<Stage> stages;
  std::vector<std::uint64_t> first_layers;  // of each stage, in the whole model
  std::vector<Skip> skips;
  std::vector<std::string> placements;  // by name
  std::vector<c10::Device> devices;     // of each placement

  std::uint64_t num_layers() const { return first_layers.back() + stages.back().layers().size(); }
  int placement_of(int stage) const { return stage % static_cast<int>(placements.size()); }
  /// Skips that go over the boundary between `stage` and the next.
  std::vector<int> passing(int stage) const;
};

/// A batch on its way: its micro-batches, and what each stage holds of them. A micro-batch of a stage is
/// touched by that stage's thread alone.
struct Batch {
  struct Held {
    std::unique_ptr<StageRun> run;
    at::Tensor loss;  // the last stage's, weighed, with a graph down to its leaves
    Tensors loss_leaves;
    BackwardGate loss_gate;
    std::uint64_t first_of_loss = 0;  // the number of autograd's node that the loss began with
  };

  Batch(const Setup& setup, int num_micro_batches);

  std::vector<Tensors> inputs, targets;                // by micro-batch
  std::vector<autograd::ScopedVersionCounter> counts;  // of both
  std::vector<bool> requires_grad;                     // of the inputs
  std::vector<double> weights;                         // of each micro-batch's loss
  Loss loss;                                           // empty: outputs are the result
  bool keep_outputs = false;
  bool split = false;  // each backward into input and weight gradients
  std::optional<core::RandomKey> random;
  std::vector<std::vector<Held>> held;  // by stage and micro-batch
  std::vector<Tensors> outputs, output_gradients, input_gradients;
  Tensors losses;  // weighed, without graph
};

class Run {
 public:
  /// Who sends to whom: the stage that receives, and whether a gradient.
  using Edge = std::pair<int, bool>;

  /// `timeout`: what `deadline` was when the caller began to wait, for messages.
  Run(std::shared_ptr<const Setup> setup, std::shared_ptr<Batch> batch, Plan plan,
      std::chrono::milliseconds timeout, const base::Deadline& deadline);

  /// The first failure counts; it ends what waits.
  void fail(std::exception_ptr error);
  /// Fails with a TimeoutError that names who computes.
  void time_out();
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// To be called before a function of the caller's. Throws: ChannelClosed where the run has failed: what the
  /// function refers to may be gone.
  void throw_if_failed() const;
  std::exception_ptr error() const;
  /// "stage 1 (Linear) on cpu:1 is in the forward of micro-batch 2", for those that compute; where none does,
  /// for those that send or receive.
  std::string who_computes() const;
  RunTimes take_times();

  std::map<Edge, std::unique_ptr<Channel>> channels;
  std::function<void(const Action&)> on_action;
  std::optional<SerializedExecution> serialized;  // none: all compute at once
  const Plan plan;
  const std::chrono::milliseconds timeout;
  const base::Deadline deadline;

 private:
  friend class PlacementRun;
  friend void run_placement(Run& run, int placement);
  struct OfPlacement {
    std::atomic<int> current{-1};  // index of the action
    std::vector<TimedAction> times;
    int live = 0, peak_live = 0;
  };

  std::shared_ptr<const Setup> setup_;
  std::shared_ptr<Batch> batch_;
  std::vector<OfPlacement> placements_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::exception_ptr error_;  // under mutex_
};

}  // namespace cohort::pipeline
