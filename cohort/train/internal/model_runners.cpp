// The runners data_parallel, model_parallel and pipeline, registered when this library loads.
//
// Layers get placements by the longest name that matches, or from a balance of measured layers. Consecutive
// layers on the same placement become a part. model_parallel runs the parts in turn, each behind a graph
// boundary; pipeline makes them its stages. Each part draws random numbers by its first layer's number in the
// model, and evaluation draws none.
#include "cohort/train/internal/model_runners.h"

#include <ATen/Context.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/placement.h"
#include "cohort/base/text/layer_entry.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/models/layers.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/pipeline/balance.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/input_fields.h"

namespace cohort::train {

using parallel::ModelRunner;
using parallel::ModelRunnerOptions;

namespace {

using base::concat;
constexpr const char* kWhereRunner = "train.make_model_runner";

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

// Consecutive layers on one placement.
struct PlacedLayers {
  std::size_t first = 0, last = 0;  // of the model's layers
  base::Placement placement;
};

// A layer is where the longest name that it begins with says.
std::vector<PlacedLayers> place_by_name(const std::vector<core::NamedLayer>& layers,
                                        const std::map<std::string, base::Placement>& place) {
  std::set<std::string> used;
  for (const core::NamedLayer& layer : layers) {
    if (const auto* const best = base::entry_of_layer(place, layer.first); best != nullptr)
      used.insert(best->first);
  }
  for (const auto& entry : place) {
    if (used.contains(entry.first)) continue;
    std::vector<std::string> names;
    for (const core::NamedLayer& layer : layers) names.push_back(layer.first);
    throw ConfigError(kWhereRunner,
                      concat("distributed.device_map: the model has no layer \"", entry.first, "\""),
                      base::least_changed_name(entry.first, names));
  }
  std::vector<PlacedLayers> parts;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::string& name = layers[i].first;
    const auto* const best = base::entry_of_layer(place, name);
    // What has no parameters ("relu", "flatten") goes along with what is before it.
    if (best == nullptr && layers[i].second.ptr()->parameters().empty() && !parts.empty()) {
      parts.back().last = i + 1;
      continue;
    }
    if (best == nullptr) {
      throw ConfigError(kWhereRunner, concat("distributed.device_map says nothing of the layer ", name),
                        concat("distributed.device_map.", name, "=cpu:0"));
    }
    const base::Placement& placement = best->second;
    if (parts.empty() || parts.back().placement != placement) parts.push_back({i, i, placement});
    parts.back().last = i + 1;
  }
  return parts;
}

// Where layers are cut for as many stages. `in_parts`: each batch is cut into micro-batches, and all stages
// compute at the same time.
std::vector<PlacedLayers> place_by_measuring(const ModelRunnerOptions& given,
                                             const std::vector<base::Placement>& placements,
                                             const pipeline::Stage& model, bool in_parts) {
  const std::int64_t parts = in_parts ? given.num_micro_batches : 1;
  pipeline::BalanceOptions options;
  options.num_placements = static_cast<int>(placements.size());
  options.num_stages = options.num_placements;
  if (in_parts) {
    options.schedule = pipeline::parse_schedule(given.schedule);
    // Of an interleaved pipeline two: they halve its idle time, each further one costs a hand-over more for less.
    options.num_stages *= pipeline::schedule_type(options.schedule).min_stages;
  }
  options.num_micro_batches = static_cast<int>(parts);
  options.optimizer_factor = given.optimizer_states ? given.optimizer_states() : 0;
  options.by_bytes = !in_parts;
  if (!given.example_input) {
    throw UsageError(kWhereRunner, "layers are to be measured, and example_input is not given",
                     "ModelRunnerOptions::example_input, or device_map");
  }
  // BatchPlan::micro_batch, which a caller without a configuration does not have.
  const at::Tensor batch = given.example_input(divided_up(given.batch_size, parts));
  pipeline::ProfileOptions profile;
  profile.repeats = 3;
  profile.split = pipeline::schedule_type(options.schedule).splits_backward;
  profile.placements = in_parts ? placements : std::vector<base::Placement>{placements.front()};
  pipeline::Balance balance;
  try {
    balance = pipeline::balance(pipeline::profile_layers(model, batch, profile), options);
  } catch (const std::exception& error) {
    throw UsageError(
        kWhereRunner,
        concat("the layers could not be measured on a batch ", batch.sizes(), ": ", base::message_of(error)),
        in_parts && batch.size(0) == 1
            ? "fewer distributed.micro_batches, or a larger train.batch_size: each part has one sample"
            : "distributed.device_map, which names a placement for each");
  }
  std::string text = balance.text();
  text.pop_back();  // the end of its last line
  base::log_info(concat("layers cut by measuring\n", text));
  std::vector<PlacedLayers> placed;
  for (std::size_t stage = 0; stage + 1 < balance.cuts.size(); ++stage) {
    placed.push_back({balance.cuts[stage], balance.cuts[stage + 1], placements[stage % placements.size()]});
  }
  return placed;
}

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

// The model's layers, and where they are cut.
struct Cut {
  Cut(const ModelRunnerOptions& options, const std::shared_ptr<torch::nn::Module>& module, bool in_parts)
      : layers(models::layers_of(module)),
        model(layers),
        placed(options.device_map.empty() ? place_by_measuring(options, devices_of(options), model, in_parts)
                                          : place_by_name(layers, options.device_map)) {}

  std::vector<core::NamedLayer> layers;
  pipeline::Stage model;
  std::vector<PlacedLayers> placed;
};

}  // namespace

std::vector<base::Placement> devices_of(const ModelRunnerOptions& options) {
  if (!options.devices.empty()) return options.devices;
  const auto count =
      options.device.is_cpu()
          ? std::int64_t(base::CpuSet::of_process().size())
          : std::int64_t(
                at::globalContext().getAcceleratorHooksInterface(options.device.type()).deviceCount());
  std::vector<base::Placement> placements;
  for (std::int64_t i = 0; i < count; ++i) {
    placements.push_back(base::Placement::parse(concat(options.device.is_cpu() ? "cpu:" : "cuda:", i)));
  }
  return placements;
}

PipelineParts pipeline_parts(const ModelRunnerOptions& given,
                             const std::shared_ptr<torch::nn::Module>& model) {
  const Cut cut(given, model, true);
  PipelineParts parts;
  pipeline::PipelineOptions& options = parts.options;
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

namespace {

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
  const Cut cut(given, model.ptr(), false);
  return {[parts = LayerPartition(cut.model, cut.placed, given.device)](const at::Tensor& input) {
    return parts.forward(input);
  }};
}

ModelRunner make_pipeline(torch::nn::AnyModule model, const ModelRunnerOptions& given) {
  return pipeline::run_pipeline(pipeline_parts(given, model.ptr()), given.device);
}

COHORT_REGISTER_MODEL_RUNNER("data_parallel", {.make = make_data_parallel, .has_own_threads = true});
COHORT_REGISTER_MODEL_RUNNER("model_parallel", {.make = make_model_parallel, .has_own_threads = true});
COHORT_REGISTER_MODEL_RUNNER(
    "pipeline", {.make = make_pipeline,
                 .gradients = "average",
                 .unfit_gradients = {{"ddp", "gradients of a pipeline come on the threads of its stages"}},
                 .has_own_threads = true,
                 .cuts_micro_batches = true});

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
  options.batch_size = step.batch_size;
  options.optimizer_states = [optim = step.optim] { return states_per_parameter(optim); };
  options.example_input = [input = step.input](std::int64_t samples) { return zero_batch(input, samples); };
  return options;
}

ModelRunner make_model_runner(const config::DistributedConfig& config, torch::nn::AnyModule model,
                              at::Device device, const MeasuredStep& step) {
  return parallel::make_model_runner(std::move(model), model_runner_options(config, device, step));
}

}  // namespace cohort::train
