#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/core/placement.h"
#include "cohort/train/config.h"

/// What a run takes in memory, before it runs: docs/train.md, "Memory before a run".
namespace cohort::train {

/// Bytes as a function of the samples in a batch: a straight line through what two batches took.
struct MemoryLine {
  double fixed = 0;
  double per_sample = 0;
  std::int64_t at(std::int64_t samples) const;
};

/// What one forward and backward hold besides the model and the batch.
struct StepMemory {
  /// What the forward keeps for backward, by leaf layer ("layer1.0.conv1"), in the order of its run; the last
  /// one, without a name, is what came after the last layer, such as the loss. A model that does not report
  /// its layers (models/observer.h) has this one only.
  std::vector<std::pair<std::string, MemoryLine>> layers;
  /// Live bytes after each block that was given out or taken back: forward, then backward.
  std::vector<MemoryLine> curve;

  std::int64_t activations(std::int64_t samples) const;
  /// The most at any time, the gradients made by then included.
  std::int64_t peak(std::int64_t samples) const;
};

/// Runs `loss_of(input_of(n))` forward and backward for two small n, and returns what it takes at any n:
/// exact where each block is a fixed number of bytes and one per sample, and LibTorch picks the same kernels.
/// Where the two runs differ in their blocks, only their peaks are drawn out. The module's gradients are gone
/// afterwards; its buffers, and LibTorch's generator, have moved on. Threads: as MemoryWatch.
StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor& input)>& loss_of,
                      const std::function<at::Tensor(std::int64_t samples)>& input_of);

/// Bytes of one kind each; none: not known, or not measured.
struct MemoryUse {
  std::optional<std::int64_t> model;        ///< parameters and buffers
  std::optional<std::int64_t> optimizer;    ///< its state, from the first step on
  std::optional<std::int64_t> batch;        ///< input and target, as the model gets them
  std::optional<std::int64_t> activations;  ///< kept by the forward for backward
  std::optional<std::int64_t> gradients;    ///< after backward
  std::optional<std::int64_t> averages;     ///< buffers of gradients besides: `average`'s chunks
  std::optional<std::int64_t> peak;         ///< the most at any time of a step
};

struct PlaceMemory {
  std::string name;  ///< "cpu", "each rank", "replica 1 on cpu:1"
  std::int64_t samples = 0;
  MemoryUse predicted = {}, measured = {};
};

struct MemoryPlan {
  std::string model, strategy;
  int num_ranks = 1;
  std::int64_t batch_size = 0;  ///< samples whose forward is kept at once: a part, where a step accumulates
  std::int64_t parameters = 0, buffers = 0;
  std::vector<PlaceMemory> places;  ///< where there are several, the last one is all of them
  /// By layer ("layer1.0"): bytes of parameters and of activations at batch_size.
  struct Layer {
    std::string name;
    std::int64_t parameters = 0, activations = 0;
  };
  std::vector<Layer> layers;
};

struct MemoryOptions {
  /// Layers that live on placements of their own, as in parallel::place(), besides what model_parallel's
  /// distributed.place says; the rest is on `cpu`.
  std::map<std::string, core::Placement> place = {};
  /// Runs two steps of the whole batch too, and counts: on CPU placements, without the other ranks.
  bool measure = false;
};

/// Says what a run of `config` takes, from two steps with 2 and 4 samples on this CPU.
/// Throws: as make_dataset and make_model; UsageError for a pipeline, for placements of several ranks or with
/// data_parallel, and for `measure` where a placement is no CPU's.
MemoryPlan plan_memory(const Config& config, const MemoryOptions& options = {});

/// The tables that `cohort plan --memory` prints, and what `--json` does.
std::string to_text(const MemoryPlan& plan);
std::string to_json(const MemoryPlan& plan);

}  // namespace cohort::train
