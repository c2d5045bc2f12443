#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/planner/internal/memory_model.h"
#include "cohort/planner/internal/memory_probe.h"

/// What each way to run a model takes in memory, by the runner's name.
namespace cohort::planner {

/// Bytes of a model, or of a part of it.
struct ModelBytes {
  std::int64_t parameters = 0, buffers = 0, gradients = 0, optimizer = 0;
};

/// What a plan is made from.
struct PlanInputs {
  const std::map<std::string, base::Placement>& place;  ///< MemoryOptions::place
  const PlannedModel& model;
  const ModelBytes& bytes;  ///< of the whole model
  const StepMemory& step;   ///< of the plain model on one placement
  const train::BatchPlan& sizes;
};

/// One way to run a model, planned and measured. The base is one process: the model on the CPU, or some of
/// its layers on placements of their own (MemoryOptions::place). Threads: one caller at a time.
class RunnerPlan {
 public:
  /// What is measured of a placement's thread besides activations.
  struct Measured {
    bool gradients = true;
    bool peak = false;
    bool adds_model_to_peak = false;  ///< another thread made the thread's part of the model and optimizer
  };

  virtual ~RunnerPlan() = default;
  /// Throws: UsageError for what this runner does not plan.
  virtual void check(const config::DistributedConfig& config, const MemoryOptions& options) const;
  /// Adds to `options` the placements that the configuration names.
  virtual void complete(MemoryOptions& /*options*/, const config::DistributedConfig& /*config*/) const {}
  /// Cuts the model, where the runner does. Returns the placements that compute.
  virtual std::vector<base::Placement> prepare(const config::DistributedConfig& config,
                                               const train::MeasuredStep& step, const PlannedModel& model);
  /// Adds the places; where there are several, all of them together as the last.
  virtual void plan(MemoryPlan& plan, const PlanInputs& inputs) const;

  virtual Measured measured() const { return {}; }
  /// How a step that is measured runs its model.
  virtual config::DistributedConfig measured_config(const config::DistributedConfig& config) const {
    return config;
  }
  /// How the model is cut, of a pipeline; else null.
  virtual const pipeline::PipelineParts* pipeline() const { return nullptr; }
};

/// Returns the plan of the runner `name`: Cohort's own, or what ModelRunnerType::plan_memory says. A runner
/// without either is planned as plain. Throws: as parallel::model_runner_type().
std::unique_ptr<RunnerPlan> make_runner_plan(const std::string& name);

/// Returns the bytes of what `is_wanted` says by name.
ModelBytes model_bytes(const PlannedModel& model, const std::function<bool(const std::string&)>& is_wanted);

}  // namespace cohort::planner
