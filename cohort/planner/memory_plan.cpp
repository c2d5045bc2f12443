// Parameters, buffers, gradients and the optimizer's state are counted exactly, from the model. Activations
// and peak come from lines that two small steps gave, taken at the size of the run. Each strategy has a
// function that puts these numbers together, by process, replica or placement. Of several places the last
// stands for all. The model of the plan is gone before anything is measured, so it is not counted.
#include "cohort/planner/memory_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "cohort/base/error.h"
#include "cohort/planner/memory_model.h"
#include "cohort/planner/memory_probe.h"

namespace cohort::planner {
namespace {

constexpr const char* kWhere = "planner.plan_memory";

std::string gradients_of(const Config& config) {
  if (config.distributed.gradients != "auto") return config.distributed.gradients;
  return config.distributed.model == "plain" && config.distributed.nproc_per_node > 1 ? "ddp" : "none";
}

// The placement of what is called `name`; null for the rest.
const base::Placement* placement_of(const std::string& name, const MemoryOptions& options) {
  const auto* const entry = entry_of_layer(options.place, name);
  return entry == nullptr ? nullptr : &entry->second;
}

// "layer1.0.conv1" is of "layer1.0".
std::string layer_of(const std::string& name) {
  const std::size_t first = name.find('.');
  const std::size_t second = first == std::string::npos ? first : name.find('.', first + 1);
  return name.substr(0, second);
}

// How many tensors of a parameter's size the optimizer keeps once it has stepped it.
std::int64_t num_states(const std::string& type, const optim::ParamGroup& group) {
  if (type == "sgd") return group.momentum != 0 ? 1 : 0;
  return group.amsgrad.value_or(false) ? 3 : 2;  // adam, adamw
}

struct ModelBytes {
  std::int64_t parameters = 0, buffers = 0, gradients = 0, optimizer = 0;
};

// Of what `is_wanted` says by name.
ModelBytes model_bytes(const PlannedModel& model, const std::function<bool(const std::string&)>& is_wanted) {
  std::unordered_map<const void*, std::int64_t> states;
  for (const optim::ParamGroup& group : model.optimizer->param_groups()) {
    const std::int64_t count = num_states(model.optimizer->type(), group);
    for (const at::Tensor& parameter : group.params) states[parameter.unsafeGetTensorImpl()] = count;
  }
  ModelBytes bytes;
  for (const auto& item : model.any.ptr()->named_parameters()) {
    if (!is_wanted(item.key())) continue;
    const auto size = static_cast<std::int64_t>(item.value().nbytes());
    bytes.parameters += size;
    if (!item.value().requires_grad()) continue;
    bytes.gradients += size;
    bytes.optimizer += size * states[item.value().unsafeGetTensorImpl()];
  }
  for (const auto& item : model.any.ptr()->named_buffers()) {
    if (is_wanted(item.key())) bytes.buffers += static_cast<std::int64_t>(item.value().nbytes());
  }
  return bytes;
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

MemoryUse whole(const ModelBytes& bytes, const PlannedModel& model, const StepMemory& step,
                const StepSizes& sizes) {
  MemoryUse use;
  use.model = bytes.parameters + bytes.buffers;
  use.optimizer = bytes.optimizer;
  use.batch = model.batch_bytes(sizes.batch);
  use.activations = step.activations(sizes.part);
  use.gradients = bytes.gradients;
  use.peak = *use.model + *use.optimizer + *use.batch + step.peak(sizes.part);
  // While later parts are computed the gradients of the first are there.
  if (sizes.part < sizes.step) *use.peak += bytes.gradients;
  return use;
}

// The whole model on one placement, of each rank where there are several.
void plan_process(MemoryPlan& plan, const PlannedModel& model, const ModelBytes& bytes,
                  const StepMemory& step, const StepSizes& sizes) {
  const bool ranks = plan.gradients != "none";
  PlaceMemory place{.name = ranks ? base::concat("each of ", plan.num_ranks, " ranks") : "cpu",
                    .samples = sizes.part,
                    .predicted = whole(bytes, model, step, sizes)};
  // Buckets are the gradients, and stay; chunks are copies.
  if (plan.gradients == "average") place.predicted.averages = bytes.gradients;
  if (ranks) *place.predicted.peak += bytes.gradients;
  plan.places.push_back(place);
}

// What replica `index` of `count` has besides what all share.
PlaceMemory replica(std::size_t index, const base::Placement& placement, const ModelBytes& bytes,
                    const StepMemory& step, std::int64_t samples) {
  PlaceMemory place{.name = base::concat("replica ", index, " on ", placement.name), .samples = samples};
  MemoryUse& use = place.predicted;
  use.model = (placement.is_cpu() ? 0 : bytes.parameters) + (index > 0 ? bytes.buffers : 0);
  use.activations = step.activations(samples);
  use.gradients = bytes.gradients;
  use.peak = *use.model + step.peak(samples);
  return place;
}

void plan_replicas(MemoryPlan& plan, const std::vector<base::Placement>& placements,
                   const PlannedModel& model, const ModelBytes& bytes, const StepMemory& step,
                   const StepSizes& sizes) {
  const auto size = divided_up(sizes.part, std::int64_t(placements.size()));
  PlaceMemory shared{.name = "shared by the replicas"};
  shared.predicted.model = bytes.parameters + bytes.buffers;
  shared.predicted.optimizer = bytes.optimizer;
  shared.predicted.batch = model.batch_bytes(sizes.batch);
  MemoryUse all = shared.predicted;
  all.activations = all.gradients = 0;
  all.peak = *all.model + *all.optimizer + *all.batch;
  plan.places.push_back(shared);
  std::int64_t rest = sizes.part;
  for (std::size_t i = 0; i < placements.size() && rest > 0; ++i) {
    const std::int64_t samples = std::min(size, rest);
    rest -= samples;
    plan.places.push_back(replica(i, placements[i], bytes, step, samples));
    const MemoryUse& use = plan.places.back().predicted;
    *all.model += *use.model;
    *all.activations += *use.activations;
    *all.peak += *use.peak;
  }
  all.gradients = bytes.gradients;  // once they are added up
  plan.places.push_back({.name = "all", .samples = sizes.part, .predicted = all});
}

// The part of the model that is there.
PlaceMemory place_of(const std::string& name, std::int64_t samples, const ModelBytes& own) {
  PlaceMemory place{.name = name, .samples = samples};
  place.predicted.model = own.parameters + own.buffers;
  place.predicted.optimizer = own.optimizer;
  place.predicted.gradients = own.gradients;
  return place;
}

void plan_places(MemoryPlan& plan, const PlannedModel& model, const ModelBytes& bytes, const StepMemory& step,
                 const StepSizes& sizes, const MemoryOptions& options) {
  std::vector<const base::Placement*> placements{nullptr};  // none: where forward is called
  for (const auto& [name, placement] : options.place) {
    const bool is_known = std::any_of(placements.begin(), placements.end(), [&](const auto* known) {
      return known != nullptr && *known == placement;
    });
    if (!is_known) placements.push_back(&placement);
  }
  for (const base::Placement* placement : placements) {
    const auto is_here = [&](const std::string& name) {
      const base::Placement* of = placement_of(name, options);
      return (of == nullptr) == (placement == nullptr) && (of == nullptr || *of == *placement);
    };
    PlaceMemory place = place_of(placement == nullptr ? "cpu (the rest)" : placement->name, sizes.part,
                                 model_bytes(model, is_here));
    if (placement == nullptr) place.predicted.batch = model.batch_bytes(sizes.batch);
    place.predicted.activations = 0;
    for (const auto& [name, line] : step.layers) {
      if (is_here(name)) *place.predicted.activations += line.at(sizes.part);
    }
    plan.places.push_back(place);
  }
  plan.places.push_back(
      {.name = "all", .samples = sizes.part, .predicted = whole(bytes, model, step, sizes)});
}

void plan_stages(MemoryPlan& plan, const PlannedModel& model, const ModelBytes& bytes,
                 const PipelineParts& parts, const StepSizes& sizes) {
  const bool in_parts = sizes.part < sizes.step;
  const auto step = [&](const ModelRunner& call, std::int64_t samples) {
    model.step(call, model.input(samples), model.target(samples));
  };
  const std::vector<StepMemory> memories = probe_pipeline(parts, step, sizes.part, in_parts);
  const auto& placements = parts.options.placements;
  std::map<std::string, std::size_t> placement_of_layer;
  for (std::size_t stage = 0; stage < parts.stages.size(); ++stage) {
    for (const auto& layer : parts.stages[stage].layers()) {
      placement_of_layer[layer.name] = stage % placements.size();
    }
  }
  MemoryUse all = place_of("", 0, bytes).predicted;
  all.batch = model.batch_bytes(sizes.batch);
  // The thread that calls the step made the part's batch, and little more.
  all.peak = *all.batch - model.batch_bytes(sizes.part) + memories.back().peak(sizes.part);
  all.activations = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const ModelBytes own = model_bytes(model, [&](const std::string& name) {
      const auto* const entry = entry_of_layer(placement_of_layer, name);
      return entry != nullptr && entry->second == i;
    });
    PlaceMemory place = place_of(placements[i], sizes.forward, own);
    MemoryUse& use = place.predicted;
    use.activations = memories[i].activations(sizes.part);
    use.peak = *use.model + *use.optimizer + memories[i].peak(sizes.part) + (in_parts ? own.gradients : 0);
    *all.activations += *use.activations;
    *all.peak += *use.peak;
    plan.places.push_back(std::move(place));
  }
  plan.places.push_back({.name = "all", .samples = sizes.part, .predicted = all});
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

void check(const Config& config, const MemoryOptions& options) {
  const std::string& runner = config.distributed.model;
  if (runner == "model_parallel" && options.place.empty()) {
    throw UsageError(
        kWhere,
        "distributed.model is model_parallel, and distributed.device_map does not say which layers are where",
        "distributed.device_map.LAYER=cpu:1");
  }
  if (uses_placements(config.distributed) && config.distributed.nproc_per_node > 1) {
    throw UsageError(kWhere,
                     base::concat(runner, " is planned for one process, got distributed.nproc_per_node ",
                                  config.distributed.nproc_per_node),
                     "distributed.nproc_per_node=1, which is what each rank takes");
  }
  if (!options.place.empty() && (runner == "data_parallel" || runner == "pipeline")) {
    throw UsageError(kWhere,
                     base::concat("layers on placements of their own, and ", runner, ", were asked for"),
                     runner == "pipeline" ? "distributed.device_map.LAYER=cpu:1" : "distributed.model=plain");
  }
}

void check_measurable(const std::vector<base::Placement>& placements) {
  for (const base::Placement& placement : placements) {
    if (!placement.is_cpu()) {
      throw UsageError(kWhere, base::concat("only CPU memory is measured: got placement ", placement.name),
                       "without --measure");
    }
  }
}

}  // namespace

MemoryPlan plan_memory(const Config& config, const MemoryOptions& given) {
  MemoryPlan plan;
  MemoryOptions options = given;
  if (config.distributed.model == "model_parallel") {
    for (const auto& [name, placement] : config.distributed.device_map) {
      options.place.emplace(name, base::Placement::parse(placement));
    }
  }
  plan.model = config.model.name;
  plan.runner = config.distributed.model;
  plan.gradients = gradients_of(config);
  plan.num_ranks = plan.gradients != "none" ? int(config.distributed.nproc_per_node) : 1;
  check(config, options);
  const StepSizes sizes(config, plan.num_ranks);
  plan.batch_size = sizes.forward;

  std::vector<base::Placement> placements;
  std::optional<PipelineParts> pipeline;
  {
    // DeviceMapped layers would be seen on other threads: what is kept is the same without.
    PlannedModel model(config, {});
    if (plan.runner == "pipeline") {
      pipeline = pipeline_parts(config, model.any.ptr(), at::kCPU, model.model_input);
      for (const auto& name : pipeline->options.placements)
        placements.push_back(base::Placement::parse(name));
    } else if (plan.runner == "data_parallel") {
      placements = placements_of(config.distributed, at::kCPU);
    }
    for (const auto& [name, placement] : options.place) placements.push_back(placement);
    if (options.measure) check_measurable(placements);
    const StepMemory step = probe(model);
    const ModelBytes bytes = model_bytes(model, [](const std::string&) { return true; });
    plan.parameters = bytes.parameters;
    plan.buffers = bytes.buffers;
    list_layers(plan, model, step);
    if (pipeline) {
      plan_stages(plan, model, bytes, *pipeline, sizes);
    } else if (plan.runner == "data_parallel") {
      plan_replicas(plan, placements, model, bytes, step, sizes);
    } else if (!options.place.empty()) {
      plan_places(plan, model, bytes, step, sizes, options);
    } else {
      plan_process(plan, model, bytes, step, sizes);
    }
  }
  if (options.measure) {
    Config alone = config;
    const bool is_placed = plan.runner == "model_parallel";  // by parallel::apply_device_map() already
    if (is_placed) alone.distributed.model = "plain";
    measure(plan, alone, options, sizes, placements, pipeline ? &*pipeline : nullptr);
    // The buffers of averages are not there without the other ranks.
    if (plan.gradients != "none") plan.places.back().measured.peak.reset();
  }
  return plan;
}

}  // namespace cohort::planner
