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

constexpr const char* kWherePlan = "planner.plan_memory";

std::string gradients_of(const config::DistributedConfig& config) {
  if (config.gradients != "auto") return config.gradients;
  if (config.nproc_per_node == 1) return "none";
  return parallel::model_runner_type(config.model).gradients;
}

/// What data gives a model, whose fields are input and target. Throws: UsageError for data without target.
std::vector<data::Field> fields_of(const data::Dataset& data) {
  std::vector<data::Field> fields = data.fields();
  if (fields.size() < 2) throw UsageError(kWherePlan, "the data has no target beside its input");
  return fields;
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
      throw UsageError(kWherePlan,
                       base::concat("only CPU memory is measured: got placement ", placement.name),
                       "without --measure");
    }
  }
}

}  // namespace

MemoryPlan plan_memory(const config::Config& config, const MemoryOptions& given) {
  const std::unique_ptr<RunnerPlan> runner = make_runner_plan(config.distributed.model);
  MemoryPlan plan;
  MemoryOptions options = given;
  runner->complete(options, config.distributed);
  plan.model = config.model.name;
  plan.runner = config.distributed.model;
  plan.gradients = gradients_of(config.distributed);
  plan.num_ranks = plan.gradients != "none" ? int(config.distributed.nproc_per_node) : 1;
  runner->check(config.distributed, options);
  const train::BatchPlan sizes =
      train::batch_plan(config.train, config.distributed, config.data, plan.num_ranks);
  plan.batch_size = sizes.micro_batch;
  auto data = train::make_dataset(config.data, train::Split::kTrain,
                                  train::dataset_setup(config.model, config.train, config.run));
  const std::vector<data::Field> fields = fields_of(*data);
  const bool channels_last = train::is_channels_last(config.train);
  const data::Field input = train::input_field(config.data, channels_last, *data);
  const PlannedStep planned{.model = config.model,
                            .setup = {.input = input,
                                      .num_classes = static_cast<std::int64_t>(data->classes().size()),
                                      .seed = config.run.seed,
                                      .channels_last = channels_last},
                            .layers = {.input = input, .batch_size = sizes.part, .optim = config.optim},
                            .fields = fields,
                            .bf16 = config.train.precision == "bf16",
                            .label_smoothing = config.train.label_smoothing};
  data.reset();  // not of the plan

  std::vector<base::Placement> placements;
  {
    // DeviceMapped layers would be seen on other threads: what is kept is the same without.
    PlannedModel model(planned);
    placements = runner->prepare(config.distributed, planned.layers, model);
    for (const auto& [name, placement] : options.place) placements.push_back(placement);
    if (options.measure) check_measurable(placements);
    const StepMemory step = probe(model);
    const ModelBytes bytes = model_bytes(model, [](const std::string&) { return true; });
    plan.parameters = bytes.parameters;
    plan.buffers = bytes.buffers;
    list_layers(plan, model, step);
    runner->plan(plan, {options.place, model, bytes, step, sizes});
  }
  if (options.measure) {
    const config::DistributedConfig measured = runner->measured_config(config.distributed);
    measure(plan, {planned, options.place, measured, sizes, placements, *runner});
    // The buffers of averages are not there without the other ranks.
    if (plan.gradients != "none") plan.places.back().measured.peak.reset();
  }
  return plan;
}

}  // namespace cohort::planner
