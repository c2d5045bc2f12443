// Parameters, buffers, gradients and the optimizer's state are counted exactly, from the model. Activations
// and peak come from lines that two small steps gave, taken at the size of the run. The model runner puts
// these numbers together (ModelRunnerType::plan_memory). The model of the plan was made before anything is
// counted.
#include "cohort/planner/memory_plan.h"

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/planner/internal/memory_measure.h"
#include "cohort/planner/internal/memory_probe.h"
#include "cohort/planner/internal/plain_memory.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/check_parts.h"
#include "cohort/train/example_step.h"

namespace cohort::planner {
namespace {

constexpr const char* kWherePlan = "planner.plan_memory";

// "layer1.0.conv1" is of "layer1.0".
std::string layer_of(const std::string& name) {
  const std::size_t first = name.find('.');
  const std::size_t second = first == std::string::npos ? first : name.find('.', first + 1);
  return name.substr(0, second);
}

StepMemory probe(const train::ExampleStep& step, PlannedModel& model) {
  at::Tensor target;
  return probe_step(
      *model.any.ptr(),
      [&](const at::Tensor& input) {
        return step.loss([&](const at::Tensor& x) { return model.any.forward<at::Tensor>(x); }, input,
                         target);
      },
      [&](std::int64_t samples) {
        target = step.target(samples);
        return step.input(samples);
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

void check_measurable(const base::Placement& placement) {
  // The profiler counts what the CPU's allocator gives out; a GPU's memory comes from another one.
  if (placement.is_cpu()) return;
  throw UsageError(kWherePlan, base::concat("only CPU memory is measured: got placement ", placement.name),
                   "without --measure");
}

// Where no layer has a placement of its own, a runner with threads of its own takes `devices`.
void check_measurable(const parallel::ModelRunnerType& type, const parallel::ModelRunnerOptions& runner,
                      const MemoryOptions& options) {
  for (const auto& [layer, placement] : options.device_map) check_measurable(placement);
  if (type.reads_device_map) {
    for (const auto& [layer, placement] : runner.device_map) check_measurable(placement);
    if (!runner.device_map.empty()) return;
  }
  if (!type.has_own_threads) return;
  for (const base::Placement& placement : runner.devices) check_measurable(placement);
}

[[noreturn]] void throw_not_measured(const std::string& runner) {
  throw UsageError(kWherePlan, base::concat("the plan of ", runner, " is its own, and is not measured"),
                   "without --measure");
}

// Throws: UsageError for what the runner does not plan, before anything is read or computed.
void check_runner(const parallel::ModelRunnerType& type, const config::DistributedConfig& config,
                  const MemoryOptions& options) {
  if (type.plan_needs_device_map && config.device_map.empty() && options.device_map.empty()) {
    throw UsageError(kWherePlan,
                     base::concat("distributed.model is ", config.model,
                                  ", and distributed.device_map does not say which layers are where"),
                     "distributed.device_map.LAYER=cpu:1");
  }
  if (options.measure && !type.plan_is_measured) throw_not_measured(config.model);
  if (!type.plans_ranks && config.nproc_per_node > 1) {
    throw UsageError(
        kWherePlan,
        base::concat(config.model, " is planned for one process, got distributed.nproc_per_node ",
                     config.nproc_per_node),
        "distributed.nproc_per_node=1, which is what each rank takes");
  }
  if (!type.plans_placed_layers && !options.device_map.empty()) {
    throw UsageError(
        kWherePlan, base::concat("layers on placements of their own, and ", config.model, ", were asked for"),
        type.reads_device_map ? "distributed.device_map.LAYER=cpu:1" : "distributed.model=plain");
  }
}

MemoryUse sum_of(const std::vector<PlaceMemory>& places) {
  MemoryUse sum;
  for (const PlaceMemory& place : places) {
    for (const auto kind :
         {&MemoryUse::model, &MemoryUse::optimizer, &MemoryUse::batch, &MemoryUse::activations,
          &MemoryUse::gradients, &MemoryUse::averages, &MemoryUse::virtual_ranks, &MemoryUse::peak}) {
      if (const auto bytes = place.predicted.*kind) sum.*kind = (sum.*kind).value_or(0) + *bytes;
    }
  }
  return sum;
}

// Adds the places; where there are several, all of them together as the last.
void add_places(MemoryPlan& plan, const parallel::RunnerMemory& memory, std::int64_t samples) {
  if (memory.places.empty()) throw UsageError(kWherePlan, base::concat(plan.runner, " planned no place"));
  for (const parallel::PlannedPlace& place : memory.places) {
    plan.places.push_back({.name = place.name, .samples = place.samples, .predicted = place.use});
  }
  if (memory.all) {
    plan.places.push_back(
        {.name = memory.all->name, .samples = memory.all->samples, .predicted = memory.all->use});
  } else if (plan.places.size() > 1) {
    plan.places.push_back({.name = "all", .samples = samples, .predicted = sum_of(plan.places)});
  }
}

train::ExampleStepOptions step_options(const config::Config& config, const train::BatchPlan& sizes) {
  return {.model = config.model,
          .data = config.data,
          .optim = config.optim,
          .distributed = config.distributed,
          .train = config.train,
          .seed = config.run.seed,
          .plan = sizes};
}

std::optional<PlannedVirtualRanks> virtual_ranks_of(const config::DistributedConfig& config,
                                                    const train::ExampleStep& step) {
  if (config.virtual_ranks == 0) return std::nullopt;
  return PlannedVirtualRanks{.options = step.virtual_rank_options(),
                             .num_processes = static_cast<int>(config.nproc_per_node),
                             .is_elastic = config.elastic};
}

// What the runner of the run says that it keeps.
parallel::RunnerMemory ask_runner(MemoryPlan& plan, const parallel::ModelRunnerType& type,
                                  const MemoryOptions& options, const train::ExampleStep& step,
                                  const train::BatchPlan& sizes,
                                  const parallel::GradientSyncType& gradient_sync,
                                  const std::optional<PlannedVirtualRanks>& virtual_ranks) {
  // DeviceMapped layers would be seen on other threads: what is kept is the same without.
  PlannedModel model(step);
  StepMemory memory = probe(step, model);
  const auto inputs = std::make_shared<const PlanInputs>(
      PlanInputs{step, std::move(model), std::move(memory), sizes, virtual_ranks, gradient_sync});
  const parallel::PlainMemory plain = plain_memory(plan, inputs);
  plan.parameters = plain.parameters;
  plan.buffers = plain.buffers;
  list_layers(plan, inputs->model, inputs->memory);
  parallel::ModelRunnerOptions runner = step.runner_options();
  if (type.plans_placed_layers) runner.device_map = options.device_map;
  return type.plan_memory(plain, runner);
}

void measure_plan(MemoryPlan& plan, const MeasureInputs& inputs, bool is_whole) {
  if (!inputs.planned.measured) throw_not_measured(plan.runner);
  // A runner may know only now where it computes.
  for (const parallel::PlannedPlace& place : inputs.planned.places) {
    if (place.placement) check_measurable(*place.placement);
  }
  measure(plan, inputs);
  // The buffers of averages are not there without the other ranks.
  if (!is_whole) plan.places.back().measured.peak.reset();
}

}  // namespace

MemoryPlan plan_memory(const config::Config& config, const MemoryOptions& given) {
  train::check_parts(config);
  parallel::ModelRunnerType type = parallel::model_runner_type(config.distributed.model);
  MemoryPlan plan;
  // Of the run's own runner, also where memory is planned as plain.
  plan.gradients = parallel::resolve_gradients(config.distributed.gradients,
                                               int(config.distributed.nproc_per_node), type.gradients);
  if (!type.plan_memory) {
    // A lower bound, which is still of use.
    type = parallel::model_runner_type("plain");
    plan.note = base::concat("model runner ", config.distributed.model,
                             " does not say what it keeps; planned as plain");
  }
  const parallel::GradientSyncType gradient_sync = parallel::gradient_sync_type(plan.gradients);
  const bool has_virtual_ranks = config.distributed.virtual_ranks > 0;
  const bool is_one_process = !has_virtual_ranks && !gradient_sync.needs_group;
  if (has_virtual_ranks) plan.gradients = "virtual_ranks";
  if (config.distributed.elastic && !has_virtual_ranks) {
    plan.note =
        "an elastic run: planned without sums of virtual ranks, whose number distributed.virtual_ranks says";
  }
  plan.model = config.model.name;
  plan.runner = config.distributed.model;
  plan.num_ranks = is_one_process ? 1 : int(config.distributed.nproc_per_node);
  check_runner(type, config.distributed, given);
  const train::BatchPlan sizes =
      train::batch_plan(config.train, config.distributed, config.data, plan.num_ranks);
  plan.batch_size = sizes.micro_batch;
  const train::ExampleStep step(step_options(config, sizes));
  const std::optional<PlannedVirtualRanks> virtual_ranks = virtual_ranks_of(config.distributed, step);
  MemoryOptions options = given;
  if (type.plans_placed_layers && type.reads_device_map) {
    options.device_map.merge(step.runner_options().device_map);
  }
  if (options.measure) check_measurable(type, step.runner_options(), options);
  const parallel::RunnerMemory memory =
      ask_runner(plan, type, options, step, sizes, gradient_sync, virtual_ranks);
  add_places(plan, memory, sizes.part);
  // A runner that reads the device map places the layers itself, as in a run.
  if (type.reads_device_map) options.device_map.clear();
  // Other processes are not started.
  const bool is_alone = virtual_ranks && virtual_ranks->num_processes == 1 && !virtual_ranks->is_elastic;
  const std::shared_ptr<parallel::VirtualRankSync> measured_virtual_ranks =
      is_alone ? parallel::make_virtual_rank_sync(config.distributed.gradients, {}, virtual_ranks->options)
               : nullptr;
  if (options.measure) {
    measure_plan(plan, {step, options.device_map, sizes, memory, measured_virtual_ranks},
                 is_one_process || is_alone);
  }
  return plan;
}

}  // namespace cohort::planner
