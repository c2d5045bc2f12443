// Parameters, buffers, gradients and the optimizer's state are counted exactly, from the model. Activations
// and peak come from lines that two small steps gave, taken at the size of the run. A RunnerPlan puts these
// numbers together. The model of the plan is gone before anything is measured, so it is not counted.
#include "cohort/planner/memory_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "cohort/base/error.h"
#include "cohort/planner/internal/memory_model.h"
#include "cohort/planner/internal/memory_probe.h"
#include "cohort/planner/internal/runner_plan.h"

namespace cohort::planner {
namespace {

constexpr const char* kWhere = "planner.plan_memory";

std::string gradients_of(const config::Config& config) {
  // As the run resolves "auto", so that the plan counts the buffers which the run will have.
  if (config.distributed.gradients != "auto") return config.distributed.gradients;
  if (config.distributed.nproc_per_node == 1) return "none";
  return parallel::model_runner_type(config.distributed.model).gradients;
}

// "layer1.0.conv1" is of "layer1.0".
std::string layer_of(const std::string& name) {
  const std::size_t first = name.find('.');
  const std::size_t second = first == std::string::npos ? first : name.find('.', first + 1);
  return name.substr(0, second);
}

StepMemory probe(PlannedModel& model) {
  at::Tensor target;
  return probe_step(
      *model.any.ptr(),
      [&](const at::Tensor& input) {
        return model.loss([&](const at::Tensor& x) { return model.any.forward<at::Tensor>(x); }, input,
                          target);
      },
      [&](std::int64_t samples) {
        target = model.target(samples);
        return model.input(samples);
      });
}

void list_layers(MemoryPlan& plan, const PlannedModel& model, const StepMemory& step) {
  std::unordered_map<std::string, std::size_t> known;
  const auto layer = [&](const std::string& name) -> MemoryPlan::Layer& {
    const auto [found, is_new] = known.emplace(layer_of(name), plan.layers.size());
    if (is_new) plan.layers.push_back({.name = found->first});
    return plan.layers[found->second];
  };
  for (const auto& [name, line] : step.layers) layer(name).activations += line.at(plan.batch_size);
  // A parameter is of the layer that its own module is in.
  for (const auto& item : model.any.ptr()->named_parameters()) {
    const std::size_t dot = item.key().rfind('.');
    layer(dot == std::string::npos ? "" : item.key().substr(0, dot)).parameters +=
        static_cast<std::int64_t>(item.value().nbytes());
  }
}

void check_measurable(const std::vector<base::Placement>& placements) {
  for (const base::Placement& placement : placements) {
    // The profiler counts what the CPU's allocator gives out; a GPU's memory comes from another one.
    if (!placement.is_cpu()) {
      throw UsageError(kWhere, base::concat("only CPU memory is measured: got placement ", placement.name),
                       "without --measure");
    }
  }
}

}  // namespace

MemoryPlan plan_memory(const config::Config& config, const MemoryOptions& given) {
  const std::unique_ptr<RunnerPlan> runner = make_runner_plan(config.distributed.model);
  MemoryPlan plan;
  MemoryOptions options = given;
  runner->complete(options, config);
  plan.model = config.model.name;
  plan.runner = config.distributed.model;
  plan.gradients = gradients_of(config);
  plan.num_ranks = plan.gradients != "none" ? int(config.distributed.nproc_per_node) : 1;
  runner->check(config, options);
  const train::BatchPlan sizes =
      train::batch_plan(config.train, config.distributed, config.data, plan.num_ranks);
  plan.batch_size = sizes.micro_batch;

  std::vector<base::Placement> placements;
  {
    // DeviceMapped layers would be seen on other threads: what is kept is the same without.
    PlannedModel model(config, {});
    placements = runner->prepare(config, options, model);
    for (const auto& [name, placement] : options.place) placements.push_back(placement);
    if (options.measure) check_measurable(placements);
    const StepMemory step = probe(model);
    const ModelBytes bytes = model_bytes(model, [](const std::string&) { return true; });
    plan.parameters = bytes.parameters;
    plan.buffers = bytes.buffers;
    list_layers(plan, model, step);
    runner->plan(plan, {config, options, model, bytes, step, sizes});
  }
  if (options.measure) {
    measure(plan, runner->measured_config(config), options, sizes, placements, *runner);
    // The buffers of averages are not there without the other ranks.
    if (plan.gradients != "none") plan.places.back().measured.peak.reset();
  }
  return plan;
}

}  // namespace cohort::planner
