// The runners data_parallel, model_parallel and pipeline, registered when this library loads.
//
// LayerCut says which layers are on which placement. model_parallel runs these parts in turn, with a graph
// boundary around each; pipeline makes them its stages. Each part draws random numbers by its first layer's
// number in the model, and evaluation draws none.
#include "cohort/train/internal/model_runners.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/placement.h"
#include "cohort/models/layers.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/pipeline/memory_probe.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/input_fields.h"
#include "cohort/train/internal/layer_cut.h"

namespace cohort::train {

using parallel::MeasuredRun;
using parallel::MemoryUse;
using parallel::ModelRunner;
using parallel::ModelRunnerOptions;
using parallel::PlainMemory;
using parallel::PlannedPlace;
using parallel::RunnerMemory;
using pipeline::PipelineParts;

namespace {

using base::concat;

// A model whose type only AnyModule knows, as a module that can be called and cloned.
class CallableImpl : public torch::nn::Module {
 public:
  explicit CallableImpl(torch::nn::AnyModule model) : model_(std::move(model)) {
    register_module("model", model_.ptr());
  }
  at::Tensor forward(const at::Tensor& input) { return model_.forward<at::Tensor>(input); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device) const override {
    return std::make_shared<CallableImpl>(model_.clone(device));
  }
  bool is_training() const noexcept override { return model_.ptr()->is_training(); }

 private:
  torch::nn::AnyModule model_;
};

// Layers on several placements, one after the other: their gradients continue in the caller's graph.
class LayerPartition {
 public:
  LayerPartition(const pipeline::Stage& model, const std::vector<PlacedLayers>& placed, at::Device device)
      : device_(device) {
    for (const PlacedLayers& part : placed) {
      const auto worker = parallel::PlacementWorker::of(part.placement);
      auto stage = std::make_shared<pipeline::Stage>(model.part(part.first, part.last));
      stage->to(worker->device());
      const std::string name = concat("layers ", model.layers()[part.first].name, " to ",
                                      model.layers()[part.last - 1].name, " on ", part.placement.name);
      parts_.push_back({parallel::PartName(name), worker, std::move(stage), part.first});
    }
  }

  at::Tensor forward(at::Tensor value) const {
    std::optional<core::RandomKey> random;
    if (at::GradMode::is_enabled()) random = core::RandomKey::draw();  // evaluation draws nothing
    for (const PlacedStage& part : parts_) {
      if (random) random->layer = part.first_layer;
      const auto run = [stage = part.stage, random](const at::Tensor& input) {
        return stage->forward(autograd::non_leaf_proxies({input}), 0, stage->layers().size(), random).front();
      };
      value = parallel::run(part.name, part.worker, {}, run, value);
    }
    return value.to(device_);
  }

 private:
  struct PlacedStage {
    parallel::PartName name;
    std::shared_ptr<parallel::PlacementWorker> worker;
    std::shared_ptr<pipeline::Stage> stage;
    std::size_t first_layer;
  };
  at::Device device_;
  std::vector<PlacedStage> parts_;
};

// What the runner pipeline makes of a model: its layers in stages. Moves nothing yet.
PipelineParts pipeline_parts(const ModelRunnerOptions& given,
                             const std::shared_ptr<torch::nn::Module>& model) {
  const LayerCut cut(given, model, true);
  PipelineParts parts;
  pipeline::PipelineOptions& options = parts.options;
  // Placements are numbered in the order in which layers reach them. Stage i must then be on placement i
  // modulo their number, which is how plans and channels find it.
  for (const PlacedLayers& part : cut.placed) {
    parts.stages.push_back(cut.model.part(part.first, part.last));
    const auto known = std::find(options.placements.begin(), options.placements.end(), part.placement);
    if (known == options.placements.end()) options.placements.push_back(part.placement);
  }
  for (std::size_t stage = 0; stage < cut.placed.size(); ++stage) {
    const PlacedLayers& part = cut.placed[stage];
    const base::Placement& expected = options.placements[stage % options.placements.size()];
    if (part.placement == expected) continue;
    throw ConfigError(kWhereRunner,
                      concat("distributed.device_map: stage ", stage, " of the pipeline begins with layer ",
                             cut.layers[part.first].first, " on ", part.placement.name, ", expected ",
                             expected.name, ", as stages take turns on placements"));
  }
  options.num_micro_batches = static_cast<int>(given.num_micro_batches);
  options.schedule = pipeline::parse_schedule(given.schedule);
  options.keep_outputs = true;
  return parts;
}

ModelRunner make_data_parallel(torch::nn::AnyModule model, const ModelRunnerOptions& given) {
  using Callable = std::shared_ptr<CallableImpl>;
  parallel::DataParallelOptions options;
  options.device_ids = devices_of(given);
  options.output_device = base::Placement::parse(given.device.str());
  return {[parallel = parallel::DataParallel<Callable>(std::make_shared<CallableImpl>(std::move(model)),
                                                       std::move(options))](const at::Tensor& input) mutable {
    return parallel.forward(input);
  }};
}

ModelRunner make_model_parallel(torch::nn::AnyModule model, const ModelRunnerOptions& given) {
  const LayerCut cut(given, model.ptr(), false);
  return {[parts = LayerPartition(cut.model, cut.placed, given.device)](const at::Tensor& input) {
    return parts.forward(input);
  }};
}

ModelRunner make_pipeline(torch::nn::AnyModule model, const ModelRunnerOptions& given) {
  return pipeline::run_pipeline(pipeline_parts(given, model.ptr()), given.device);
}

// What replica `index` has besides what all share.
PlannedPlace replica(std::size_t index, const base::Placement& placement, const PlainMemory& plain,
                     std::int64_t samples) {
  PlannedPlace place{
      .name = concat("replica ", index, " on ", placement.name), .samples = samples, .placement = placement};
  // Replicas on the CPU share the parameters. Each has buffers of its own, but the first uses the model's.
  place.use.model = (placement.is_cpu() ? 0 : plain.parameters) + (index > 0 ? plain.buffers : 0);
  place.use.activations = plain.activations(samples);
  place.use.gradients = plain.use.gradients;
  place.use.peak = *place.use.model + plain.peak(samples);
  return place;
}

RunnerMemory plan_data_parallel(const PlainMemory& plain, const ModelRunnerOptions& options) {
  const std::vector<base::Placement> placements = devices_of(options);
  const std::int64_t size = BatchPlan{.part = plain.samples}.replica(std::ssize(placements));
  PlannedPlace shared{.name = "shared by the replicas"};
  shared.use = {.model = plain.use.model, .optimizer = plain.use.optimizer, .batch = plain.use.batch};
  MemoryUse all = shared.use;
  all.activations = 0;
  all.peak = *all.model + *all.optimizer + *all.batch;
  RunnerMemory memory({shared}, {.has_gradients = false, .has_peak = true});
  std::int64_t rest = plain.samples;
  // As the batch is cut: parts of equal size, the last ones smaller or none at all.
  for (std::size_t i = 0; i < placements.size() && rest > 0; ++i) {
    const std::int64_t samples = std::min(size, rest);
    rest -= samples;
    memory.places.push_back(replica(i, placements[i], plain, samples));
    const MemoryUse& use = memory.places.back().use;
    *all.model += *use.model;
    *all.activations += *use.activations;
    *all.peak += *use.peak;
  }
  all.gradients = plain.use.gradients;  // once they are added up
  memory.all = {.name = "all", .samples = plain.samples, .use = all};
  return memory;
}

// Each layer where the run has it, also those that the device map does not name.
RunnerMemory plan_model_parallel(const PlainMemory& plain, const ModelRunnerOptions& options) {
  const LayerCut cut(options, plain.model.ptr(), false);
  std::map<std::string, base::Placement> places;
  for (const PlacedLayers& part : cut.placed) {
    for (std::size_t i = part.first; i < part.last; ++i) places.emplace(cut.layers[i].first, part.placement);
  }
  RunnerMemory memory = parallel::memory_by_placement(plain, places);
  // In the order in which a batch reaches them; the calling thread's place is the first.
  std::ranges::stable_sort(memory.places, {}, [&](const PlannedPlace& place) {
    const auto is_there = [&](const PlacedLayers& part) { return part.placement == place.placement; };
    return place.placement ? std::ranges::find_if(cut.placed, is_there) - cut.placed.begin() : -1;
  });
  memory.measured->make = [options](torch::nn::AnyModule model, const auto& /*after_forward*/) {
    return make_model_parallel(std::move(model), options);
  };
  return memory;
}

// The same cut of another copy of the model.
PipelineParts parts_like(const PipelineParts& of, const torch::nn::AnyModule& model) {
  const pipeline::Stage whole(models::layers_of(model.ptr()));
  PipelineParts parts{.stages = {}, .options = of.options};
  std::size_t first = 0;
  for (const pipeline::Stage& stage : of.stages) {
    parts.stages.push_back(whole.part(first, first + stage.layers().size()));
    first += stage.layers().size();
  }
  return parts;
}

// As run_pipeline(), and says after each forward what gradients there are.
ModelRunner run_measured(PipelineParts parts, const MeasuredRun::AfterForward& after_forward) {
  parts.options.on_action = [after_forward, parts](const pipeline::Action& action) {
    if (action.kind != pipeline::ActionKind::kForward) return;
    const auto placement = static_cast<std::size_t>(action.stage) % parts.options.placements.size();
    after_forward(placement, pipeline::gradient_bytes(parts, static_cast<int>(placement)));
  };
  return pipeline::run_pipeline(std::move(parts), at::kCPU);
}

RunnerMemory plan_pipeline(const PlainMemory& plain, const ModelRunnerOptions& options) {
  PipelineParts parts = pipeline_parts(options, plain.model.ptr());
  RunnerMemory memory = pipeline::plan_memory(plain, parts, micro_batch_size(options));
  memory.measured = {.make = [cut = std::move(parts)](
                                 const torch::nn::AnyModule& model,
                                 const auto& after) { return run_measured(parts_like(cut, model), after); },
                     .calls_after_forward = true,
                     .has_peak = true,
                     .adds_model_to_peak = true};
  return memory;
}

COHORT_REGISTER_MODEL_RUNNER("data_parallel", {.make = make_data_parallel,
                                               .has_own_threads = true,
                                               .plan_is_measured = true,
                                               .plan_memory = plan_data_parallel});
COHORT_REGISTER_MODEL_RUNNER("model_parallel", {.make = make_model_parallel,
                                                .has_own_threads = true,
                                                .reads_device_map = true,
                                                .plans_placed_layers = true,
                                                .plan_needs_device_map = true,
                                                .plan_is_measured = true,
                                                .plan_memory = plan_model_parallel});
COHORT_REGISTER_MODEL_RUNNER(
    "pipeline", {.make = make_pipeline,
                 .gradients = "average",
                 .unfit_gradients = {{"ddp", "gradients of a pipeline come on the threads of its stages"}},
                 .has_own_threads = true,
                 .cuts_micro_batches = true,
                 .reads_device_map = true,
                 .plan_is_measured = true,
                 .plan_memory = plan_pipeline});

}  // namespace

std::map<std::string, base::Placement> parse_device_map(const config::DistributedConfig& config) {
  std::map<std::string, base::Placement> map;
  for (const auto& [layer, placement] : config.device_map) {
    map.emplace(layer, base::Placement::parse(placement));
  }
  return map;
}

ModelRunnerOptions model_runner_options(const config::DistributedConfig& config, at::Device device,
                                        const MeasuredStep& step) {
  ModelRunnerOptions options;
  options.name = config.model;
  options.device = device;
  if (!config.devices.empty()) options.devices = base::parse_placements(config.devices);
  options.device_map = parse_device_map(config);
  options.schedule = config.schedule;
  options.num_micro_batches = config.micro_batches;
  options.batch_size = step.plan.part;
  options.micro_batch_size = step.plan.micro_batch;
  options.optimizer_states = [optim = step.optim] { return states_per_parameter(optim); };
  options.example_input = [input = step.input](std::int64_t samples) { return zero_batch(input, samples); };
  return options;
}

ModelRunner make_model_runner(const config::DistributedConfig& config, torch::nn::AnyModule model,
                              at::Device device, const MeasuredStep& step) {
  return parallel::make_model_runner(std::move(model), model_runner_options(config, device, step));
}

}  // namespace cohort::train
