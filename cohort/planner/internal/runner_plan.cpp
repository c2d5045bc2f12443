// Parameters, buffers, gradients and the optimizer's state are counted exactly. Each runner puts them
// together with the lines that two small steps gave, by process, replica or placement. Of several places the
// last stands for all.
#include "cohort/planner/internal/runner_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/layer_entry.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/pipeline/memory_probe.h"
#include "cohort/train/internal/model_runners.h"

namespace cohort::planner {
namespace {

constexpr const char* kWhereRunner = "planner.plan_memory";

// The placement of what is called `name`; null for the rest.
const base::Placement* placement_of(const std::string& name,
                                    const std::map<std::string, base::Placement>& place) {
  const auto* const entry = base::entry_of_layer(place, name);
  return entry == nullptr ? nullptr : &entry->second;
}

MemoryUse whole(const ModelBytes& bytes, const PlannedModel& model, const StepMemory& step,
                const train::BatchPlan& sizes) {
  MemoryUse use;
  use.model = bytes.parameters + bytes.buffers;
  use.optimizer = bytes.optimizer;
  use.batch = model.batch_bytes(sizes.loaded);
  // A part of a step at a time: what the forward of one part keeps is gone before the next begins.
  use.activations = step.activations(sizes.part);
  use.gradients = bytes.gradients;
  use.peak = *use.model + *use.optimizer + *use.batch + step.peak(sizes.part);
  // While later parts are computed the gradients of the first are there.
  if (sizes.part < sizes.step) *use.peak += bytes.gradients;
  return use;
}

// The whole model on one placement, of each rank where there are several.
PlaceMemory plain_place(const MemoryPlan& plan, const PlannedModel& model, const ModelBytes& bytes,
                        const StepMemory& step, const train::BatchPlan& sizes) {
  const bool ranks = plan.gradients != "none";
  PlaceMemory place{.name = ranks ? base::concat("each of ", plan.num_ranks, " ranks") : "cpu",
                    .samples = sizes.part,
                    .predicted = whole(bytes, model, step, sizes)};
  // The buckets of ddp are the gradients, and stay; the chunks of average are copies.
  if (parallel::gradient_sync_type(plan.gradients).copies_gradients)
    place.predicted.averages = bytes.gradients;
  if (ranks) *place.predicted.peak += bytes.gradients;
  return place;
}

// What replica `index` of `count` has besides what all share.
PlaceMemory replica(std::size_t index, const base::Placement& placement, const ModelBytes& bytes,
                    const StepMemory& step, std::int64_t samples) {
  PlaceMemory place{.name = base::concat("replica ", index, " on ", placement.name), .samples = samples};
  MemoryUse& use = place.predicted;
  // Replicas on the CPU share the parameters. Each has buffers of its own, but the first uses the model's.
  use.model = (placement.is_cpu() ? 0 : bytes.parameters) + (index > 0 ? bytes.buffers : 0);
  use.activations = step.activations(samples);
  use.gradients = bytes.gradients;
  use.peak = *use.model + step.peak(samples);
  return place;
}

// The part of the model that is there.
PlaceMemory place_of(const std::string& name, std::int64_t samples, const ModelBytes& own) {
  PlaceMemory place{.name = name, .samples = samples};
  place.predicted.model = own.parameters + own.buffers;
  place.predicted.optimizer = own.optimizer;
  place.predicted.gradients = own.gradients;
  return place;
}

void plan_placed_layers(MemoryPlan& plan, const PlannedModel& model, const ModelBytes& bytes,
                        const StepMemory& step, const train::BatchPlan& sizes,
                        const std::map<std::string, base::Placement>& place_of_layer) {
  std::vector<const base::Placement*> placements{nullptr};  // none: where forward is called
  for (const auto& [name, placement] : place_of_layer) {
    const bool is_known = std::any_of(placements.begin(), placements.end(), [&](const auto* known) {
      return known != nullptr && *known == placement;
    });
    if (!is_known) placements.push_back(&placement);
  }
  for (const base::Placement* placement : placements) {
    const auto is_here = [&](const std::string& name) {
      const base::Placement* of = placement_of(name, place_of_layer);
      return (of == nullptr) == (placement == nullptr) && (of == nullptr || *of == *placement);
    };
    PlaceMemory place = place_of(placement == nullptr ? "cpu (the rest)" : placement->name, sizes.part,
                                 model_bytes(model, is_here));
    if (placement == nullptr) place.predicted.batch = model.batch_bytes(sizes.loaded);
    place.predicted.activations = 0;
    for (const auto& [name, line] : step.layers) {
      if (is_here(name)) *place.predicted.activations += line.at(sizes.part);
    }
    plan.places.push_back(place);
  }
  plan.places.push_back(
      {.name = "all", .samples = sizes.part, .predicted = whole(bytes, model, step, sizes)});
}

void check_one_process(const config::DistributedConfig& config) {
  if (config.nproc_per_node <= 1) return;
  throw UsageError(kWhereRunner,
                   base::concat(config.model, " is planned for one process, got distributed.nproc_per_node ",
                                config.nproc_per_node),
                   "distributed.nproc_per_node=1, which is what each rank takes");
}

void check_no_placed_layers(const config::DistributedConfig& config, const MemoryOptions& options,
                            const char* hint) {
  if (options.place.empty()) return;
  throw UsageError(kWhereRunner,
                   base::concat("layers on placements of their own, and ", config.model, ", were asked for"),
                   hint);
}

// A replica and a part of the batch on each placement.
class DataParallelPlan : public RunnerPlan {
 public:
  void check(const config::DistributedConfig& config, const MemoryOptions& options) const override {
    check_one_process(config);
    check_no_placed_layers(config, options, "distributed.model=plain");
  }
  std::vector<base::Placement> prepare(const config::DistributedConfig& config,
                                       const train::MeasuredStep& step,
                                       const PlannedModel& /*model*/) override {
    placements_ = train::devices_of(train::model_runner_options(config, at::kCPU, step));
    return placements_;
  }
  void plan(MemoryPlan& plan, const PlanInputs& in) const override {
    const std::int64_t size = in.sizes.replica(std::int64_t(placements_.size()));
    PlaceMemory shared{.name = "shared by the replicas"};
    shared.predicted.model = in.bytes.parameters + in.bytes.buffers;
    shared.predicted.optimizer = in.bytes.optimizer;
    shared.predicted.batch = in.model.batch_bytes(in.sizes.loaded);
    MemoryUse all = shared.predicted;
    all.activations = all.gradients = 0;
    all.peak = *all.model + *all.optimizer + *all.batch;
    plan.places.push_back(shared);
    std::int64_t rest = in.sizes.part;
    // As the batch is cut: parts of equal size, the last ones smaller or none at all.
    for (std::size_t i = 0; i < placements_.size() && rest > 0; ++i) {
      const std::int64_t samples = std::min(size, rest);
      rest -= samples;
      plan.places.push_back(replica(i, placements_[i], in.bytes, in.step, samples));
      const MemoryUse& use = plan.places.back().predicted;
      *all.model += *use.model;
      *all.activations += *use.activations;
      *all.peak += *use.peak;
    }
    all.gradients = in.bytes.gradients;  // once they are added up
    plan.places.push_back({.name = "all", .samples = in.sizes.part, .predicted = all});
  }
  Measured measured() const override { return {.gradients = false, .peak = true}; }

 private:
  std::vector<base::Placement> placements_;
};

// Layers on placements, one after the other.
class ModelParallelPlan : public RunnerPlan {
 public:
  void check(const config::DistributedConfig& config, const MemoryOptions& options) const override {
    if (options.place.empty()) {
      throw UsageError(kWhereRunner,
                       "distributed.model is model_parallel, and distributed.device_map does not say which "
                       "layers are where",
                       "distributed.device_map.LAYER=cpu:1");
    }
    check_one_process(config);
  }
  void complete(MemoryOptions& options, const config::DistributedConfig& config) const override {
    options.place.merge(train::parse_device_map(config));
  }
  config::DistributedConfig measured_config(const config::DistributedConfig& config) const override {
    config::DistributedConfig placed = config;
    placed.model = "plain";  // parallel::apply_device_map() has placed the layers
    return placed;
  }
};

// Stages on placements. Steps of the real pipeline are probed.
class PipelinePlan : public RunnerPlan {
 public:
  void check(const config::DistributedConfig& config, const MemoryOptions& options) const override {
    check_one_process(config);
    check_no_placed_layers(config, options, "distributed.device_map.LAYER=cpu:1");
  }
  std::vector<base::Placement> prepare(const config::DistributedConfig& config,
                                       const train::MeasuredStep& step, const PlannedModel& model) override {
    parts_ = train::pipeline_parts(train::model_runner_options(config, at::kCPU, step), model.any.ptr());
    return parts_->options.placements;
  }
  void plan(MemoryPlan& plan, const PlanInputs& in) const override {
    const bool in_parts = in.sizes.part < in.sizes.step;
    const auto step = [&](const parallel::ModelRunner& call, std::int64_t samples) {
      in.model.step(call, in.model.input(samples), in.model.target(samples));
    };
    const std::vector<StepMemory> memories = pipeline::probe_memory(*parts_, step, in.sizes.part, in_parts);
    const auto& placements = parts_->options.placements;
    std::map<std::string, std::size_t> placement_of_layer;
    for (std::size_t stage = 0; stage < parts_->stages.size(); ++stage) {
      for (const auto& layer : parts_->stages[stage].layers()) {
        placement_of_layer[layer.name] = stage % placements.size();
      }
    }
    MemoryUse all = place_of("", 0, in.bytes).predicted;
    all.batch = in.model.batch_bytes(in.sizes.loaded);
    // The thread that calls the step made the part's batch, and little more.
    all.peak = *all.batch - in.model.batch_bytes(in.sizes.part) + memories.back().peak(in.sizes.part);
    all.activations = 0;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      const ModelBytes own = model_bytes(in.model, [&](const std::string& name) {
        const auto* const entry = base::entry_of_layer(placement_of_layer, name);
        return entry != nullptr && entry->second == i;
      });
      PlaceMemory place = place_of(placements[i].name, in.sizes.micro_batch, own);
      MemoryUse& use = place.predicted;
      use.activations = memories[i].activations(in.sizes.part);
      use.peak =
          *use.model + *use.optimizer + memories[i].peak(in.sizes.part) + (in_parts ? own.gradients : 0);
      *all.activations += *use.activations;
      *all.peak += *use.peak;
      plan.places.push_back(std::move(place));
    }
    plan.places.push_back({.name = "all", .samples = in.sizes.part, .predicted = all});
  }
  Measured measured() const override { return {.peak = true, .adds_model_to_peak = true}; }
  const pipeline::PipelineParts* pipeline() const override { return &*parts_; }

 private:
  std::optional<pipeline::PipelineParts> parts_;
};

// A runner that says itself what it takes: one of a plug-in.
class RegisteredPlan : public RunnerPlan {
 public:
  explicit RegisteredPlan(parallel::ModelRunnerType type) : type_(std::move(type)) {}

  void check(const config::DistributedConfig& config, const MemoryOptions& options) const override {
    check_one_process(config);
    check_no_placed_layers(config, options, "distributed.model=plain");
    if (!options.measure) return;
    throw UsageError(kWhereRunner,
                     base::concat("the plan of ", config.model, " is its own, and is not measured"),
                     "without --measure");
  }
  std::vector<base::Placement> prepare(const config::DistributedConfig& config,
                                       const train::MeasuredStep& step,
                                       const PlannedModel& /*model*/) override {
    options_ = train::model_runner_options(config, at::kCPU, step);
    return {};
  }
  void plan(MemoryPlan& plan, const PlanInputs& in) const override {
    const parallel::PlainMemory plain{
        .parameters = in.bytes.parameters,
        .buffers = in.bytes.buffers,
        .samples = in.sizes.part,
        .use = plain_place(plan, in.model, in.bytes, in.step, in.sizes).predicted,
        .activations = [&](std::int64_t samples) { return in.step.activations(samples); },
        .peak = [&](std::int64_t samples) { return in.step.peak(samples); }};
    const std::vector<parallel::PlannedPlace> places = type_.plan_memory(plain, options_);
    if (places.empty()) throw UsageError(kWhereRunner, base::concat(plan.runner, " planned no place"));
    MemoryUse all;
    for (const parallel::PlannedPlace& place : places) {
      plan.places.push_back({.name = place.name, .samples = place.samples, .predicted = place.use});
      for (const auto kind :
           {&MemoryUse::model, &MemoryUse::optimizer, &MemoryUse::batch, &MemoryUse::activations,
            &MemoryUse::gradients, &MemoryUse::averages, &MemoryUse::peak}) {
        if (const auto bytes = place.use.*kind) all.*kind = (all.*kind).value_or(0) + *bytes;
      }
    }
    if (places.size() > 1) {
      plan.places.push_back({.name = "all", .samples = in.sizes.part, .predicted = all});
    }
  }

 private:
  parallel::ModelRunnerType type_;
  parallel::ModelRunnerOptions options_;
};

template <typename Plan>
std::unique_ptr<RunnerPlan> make() {
  return std::make_unique<Plan>();
}

using Make = std::function<std::unique_ptr<RunnerPlan>()>;

base::Registry<Make>& registry() {
  static auto* instance = new base::Registry<Make>("runner plan", "planner.runner_plan",
                                                   {{"plain", make<RunnerPlan>},
                                                    {"data_parallel", make<DataParallelPlan>},
                                                    {"model_parallel", make<ModelParallelPlan>},
                                                    {"pipeline", make<PipelinePlan>}});
  return *instance;
}

}  // namespace

void RunnerPlan::check(const config::DistributedConfig& /*config*/, const MemoryOptions& /*options*/) const {}

std::vector<base::Placement> RunnerPlan::prepare(const config::DistributedConfig& /*config*/,
                                                 const train::MeasuredStep& /*step*/,
                                                 const PlannedModel& /*model*/) {
  return {};
}

void RunnerPlan::plan(MemoryPlan& plan, const PlanInputs& in) const {
  if (in.place.empty()) {
    plan.places.push_back(plain_place(plan, in.model, in.bytes, in.step, in.sizes));
  } else {
    plan_placed_layers(plan, in.model, in.bytes, in.step, in.sizes, in.place);
  }
}

std::unique_ptr<RunnerPlan> make_runner_plan(const std::string& name) {
  if (const auto own = registry().find(name)) return (*own)();
  parallel::ModelRunnerType type = parallel::model_runner_type(name);
  if (type.plan_memory) return std::make_unique<RegisteredPlan>(std::move(type));
  return make<RunnerPlan>();  // a lower bound, which is still of use
}

ModelBytes model_bytes(const PlannedModel& model, const std::function<bool(const std::string&)>& is_wanted) {
  std::unordered_map<const void*, std::int64_t> states;
  for (const optim::ParamGroup& group : model.optimizer->param_groups()) {
    for (const at::Tensor& parameter : group.params) {
      // By identity of the tensor: groups have no names of parameters, the module has no groups.
      states[parameter.unsafeGetTensorImpl()] = model.optimizer->state_bytes(group, parameter);
    }
  }
  ModelBytes bytes;
  for (const auto& item : model.any.ptr()->named_parameters()) {
    if (!is_wanted(item.key())) continue;
    const auto size = static_cast<std::int64_t>(item.value().nbytes());
    bytes.parameters += size;
    if (!item.value().requires_grad()) continue;
    bytes.gradients += size;
    bytes.optimizer += states[item.value().unsafeGetTensorImpl()];
  }
  for (const auto& item : model.any.ptr()->named_buffers()) {
    if (is_wanted(item.key())) bytes.buffers += static_cast<std::int64_t>(item.value().nbytes());
  }
  return bytes;
}

}  // namespace cohort::planner
