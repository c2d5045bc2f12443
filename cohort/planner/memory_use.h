#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/parallel/model_runner.h"

namespace cohort::planner {

using parallel::MemoryUse;

/// What one place holds.
struct PlaceMemory {
  std::string name;                         ///< "cpu", "each rank", "replica 1 on cpu:1"
  std::int64_t samples = 0;                 ///< of one forward there
  MemoryUse predicted = {}, measured = {};  ///< measured: none without MemoryOptions::measure
};

/// What a run takes.
struct MemoryPlan {
  std::string model;      ///< its name
  std::string runner;     ///< distributed.model
  std::string gradients;  ///< distributed.gradients, never auto; "virtual_ranks"
  int num_ranks = 1;
  /// Samples of one forward: a part, where a step accumulates; a pipeline's micro-batch.
  std::int64_t batch_size = 0;
  /// Bytes of the whole model.
  std::int64_t parameters = 0, buffers = 0;
  std::string note = {};  ///< a line for the user: that the runner does not say what it keeps; or empty
  std::vector<PlaceMemory> places;  ///< where there are several, the last one is all of them
  /// By layer ("layer1.0"): bytes of parameters and of activations at batch_size.
  struct Layer {
    std::string name;
    std::int64_t parameters = 0, activations = 0;
  };
  std::vector<Layer> layers;  ///< in the order of the model
};

/// How a plan is made.
struct MemoryOptions {
  /// Layers that live on placements of their own, as in parallel::apply_device_map(), besides what
  /// model_parallel's distributed.device_map says; the rest is on `cpu`.
  std::map<std::string, base::Placement> device_map = {};
  /// Runs two steps of the whole batch too, and counts: on CPU placements, without the other ranks.
  bool measure = false;
};

}  // namespace cohort::planner
