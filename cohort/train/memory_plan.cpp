#include "cohort/train/memory_plan.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <unordered_map>

#include "cohort/core/device.h"
#include "cohort/core/error.h"
#include "cohort/core/memory_watch.h"
#include "cohort/optim/autocast.h"
#include "cohort/parallel/placed.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/train/build.h"
#include "cohort/train/model_call.h"

namespace cohort::train {
namespace {

constexpr const char* kWhere = "train.plan_memory";

std::string strategy_of(const Config& config) {
  if (config.distributed.strategy != "auto") return config.distributed.strategy;
  return config.distributed.nproc_per_node > 1 ? "ddp" : "single";
}

bool has_ranks(const std::string& strategy) {
  return strategy == "ddp" || strategy == "average";
}

std::int64_t divided_up(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

// The placement of what is called `name`; null for the rest.
const core::Placement* placement_of(const std::string& name, const MemoryOptions& options) {
  const auto* const entry = entry_of_layer(options.place, name);
  return entry == nullptr ? nullptr : &entry->second;
}

// "layer1.0.conv1" is of "layer1.0".
std::string layer_of(const std::string& name) {
  const std::size_t first = name.find('.');
  const std::size_t second = first == std::string::npos ? first : name.find('.', first + 1);
  return name.substr(0, second);
}

struct Sizes {
  Sizes(const Config& config, int ranks) {
    step = config.train.global_batch_size > 0 ? divided_up(config.train.global_batch_size, ranks)
                                              : config.train.batch_size * config.train.accumulate;
    part = divided_up(step, config.train.accumulate);
  }
  std::int64_t step, part;  // samples of a rank: in a step, and whose forward is kept at once
};

// A step's parts, made for planning alone.
class Model {
 public:
  Model(const Config& config, const MemoryOptions& options) : config_(config) {
    const auto data = make_dataset(config, Split::kTrain);
    fields_ = data->fields();
    if (fields_.size() < 2) throw UsageError(kWhere, "the data has no target beside its input");
    any = train::make_model(config, std::int64_t(data->classes().size()), at::kCPU);
    if (!options.place.empty()) parallel::place(*any.ptr(), options.place);
    optimizer = make_optimizer(config.optim, *any.ptr());
  }

  at::Tensor input(std::int64_t samples) const {
    const data::Field& field = fields_[0];
    std::vector<std::int64_t> shape{samples};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    const bool last = field.channels_last && field.shape.size() == 3;
    return at::zeros(shape, field.dtype)
        .contiguous(last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  }
  at::Tensor target(std::int64_t samples) const {
    std::vector<std::int64_t> shape{samples};
    shape.insert(shape.end(), fields_[1].shape.begin(), fields_[1].shape.end());
    return at::zeros(shape, fields_[1].dtype);
  }
  std::int64_t batch_bytes(std::int64_t samples) const {
    return samples * (fields_[0].bytes() + fields_[1].bytes());
  }
  // As ClassificationTask computes it.
  at::Tensor loss(const std::function<at::Tensor(const at::Tensor&)>& forward, const at::Tensor& input,
                  const at::Tensor& target) const {
    std::optional<optim::Autocast> autocast;
    if (config_.train.precision == "bf16") autocast.emplace(at::kCPU, at::kBFloat16);
    const at::Tensor logits = forward(input);
    autocast.reset();
    return at::cross_entropy_loss(logits.to(at::kFloat), target, {}, at::Reduction::Mean, -100,
                                  config_.train.label_smoothing);
  }

  torch::nn::AnyModule any;
  std::shared_ptr<optim::Optimizer> optimizer;

 private:
  const Config& config_;
  std::vector<data::Field> fields_;
};

// How many tensors of a parameter's size the optimizer keeps once it has stepped it.
std::int64_t num_states(const std::string& type, const optim::ParamGroup& group) {
  if (type == "sgd") return group.momentum != 0 ? 1 : 0;
  return group.amsgrad.value_or(false) ? 3 : 2;  // adam, adamw
}

struct ModelBytes {
  std::int64_t parameters = 0, buffers = 0, gradients = 0, optimizer = 0;
};

// Of what `is_wanted` says by name.
ModelBytes model_bytes(const Model& model, const std::function<bool(const std::string&)>& is_wanted) {
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

StepMemory probe(Model& model) {
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

MemoryUse whole(const ModelBytes& bytes, const Model& model, const StepMemory& step, const Sizes& sizes) {
  MemoryUse use;
  use.model = bytes.parameters + bytes.buffers;
  use.optimizer = bytes.optimizer;
  use.batch = model.batch_bytes(sizes.step);
  use.activations = step.activations(sizes.part);
  use.gradients = bytes.gradients;
  use.peak = *use.model + *use.optimizer + *use.batch + step.peak(sizes.part);
  // While later parts are computed the gradients of the first are there.
  if (sizes.part < sizes.step) *use.peak += bytes.gradients;
  return use;
}

// What replica `index` of `count` has besides what all share.
PlaceMemory replica(std::size_t index, const core::Placement& placement, const ModelBytes& bytes,
                    const StepMemory& step, std::int64_t samples) {
  PlaceMemory place{.name = core::concat("replica ", index, " on ", placement.name), .samples = samples};
  MemoryUse& use = place.predicted;
  use.model = (placement.is_cpu() ? 0 : bytes.parameters) + (index > 0 ? bytes.buffers : 0);
  use.activations = step.activations(samples);
  use.gradients = bytes.gradients;
  use.peak = *use.model + step.peak(samples);
  return place;
}

void plan_replicas(MemoryPlan& plan, const Config& config, const Model& model, const ModelBytes& bytes,
                   const StepMemory& step, const Sizes& sizes) {
  const auto placements = placements_of(config.distributed, at::kCPU);
  const auto size = divided_up(sizes.part, std::int64_t(placements.size()));
  PlaceMemory shared{.name = "shared by the replicas"};
  shared.predicted.model = bytes.parameters + bytes.buffers;
  shared.predicted.optimizer = bytes.optimizer;
  shared.predicted.batch = model.batch_bytes(sizes.step);
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

void plan_places(MemoryPlan& plan, const Model& model, const ModelBytes& bytes, const StepMemory& step,
                 const Sizes& sizes, const MemoryOptions& options) {
  std::vector<const core::Placement*> placements{nullptr};  // none: where forward is called
  for (const auto& [name, placement] : options.place) {
    const bool is_known = std::any_of(placements.begin(), placements.end(), [&](const auto* known) {
      return known != nullptr && *known == placement;
    });
    if (!is_known) placements.push_back(&placement);
  }
  for (const core::Placement* placement : placements) {
    const auto is_here = [&](const std::string& name) {
      const core::Placement* of = placement_of(name, options);
      return (of == nullptr) == (placement == nullptr) && (of == nullptr || *of == *placement);
    };
    const ModelBytes own = model_bytes(model, is_here);
    PlaceMemory place{.name = placement == nullptr ? "cpu (the rest)" : placement->name,
                      .samples = sizes.part};
    place.predicted.model = own.parameters + own.buffers;
    place.predicted.optimizer = own.optimizer;
    place.predicted.gradients = own.gradients;
    if (placement == nullptr) place.predicted.batch = model.batch_bytes(sizes.step);
    place.predicted.activations = 0;
    for (const auto& [name, line] : step.layers) {
      if (is_here(name)) *place.predicted.activations += line.at(sizes.part);
    }
    plan.places.push_back(place);
  }
  plan.places.push_back(
      {.name = "all", .samples = sizes.part, .predicted = whole(bytes, model, step, sizes)});
}

void list_layers(MemoryPlan& plan, const Model& model, const StepMemory& step) {
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

// Note [What is measured]
// Two steps as ClassificationTask makes them: the first has the optimizer make its state, the second is the
// one that is counted. Activations and gradients are of the thread that asked for them.
class Measurement {
 public:
  Measurement(const Config& config, const MemoryOptions& options) : config_(config), options_(options) {}

  void run(MemoryPlan& plan, const Sizes& sizes, const std::vector<core::Placement>& placements) {
    std::vector<std::shared_ptr<parallel::PlacementWorker>> workers;
    std::vector<std::thread::id> threads;
    for (const core::Placement& placement : placements) {
      workers.push_back(parallel::PlacementWorker::of(placement));
      threads.push_back(workers.back()->run("who", [] { return std::this_thread::get_id(); }));
    }
    core::MemoryWatch watch;
    Model model(config_, options_);
    MemoryUse& all = plan.places.back().measured;
    all.model = watch.total().now;
    const auto forward = make_model_call(config_, model.any, at::kCPU).forward;
    const at::Tensor input = model.input(sizes.step), target = model.target(sizes.step);
    all.batch = watch.total().now - *all.model;
    step(watch, model, forward, input, target, sizes.part, nullptr);
    model.optimizer->zero_grad();
    watch.begin();
    Counts before(watch, threads), counts(watch, threads);
    step(watch, model, forward, input, target, sizes.part, [&](bool after_backward) {
      const Counts now(watch, threads);
      (after_backward ? counts.gradients : counts.activations) = now.at_begin;
    });
    all.peak = watch.total().peak;
    all.activations = counts.activations[0] - before.at_begin[0];
    all.gradients = counts.gradients[0] - before.at_begin[0];
    all.optimizer = optimizer_bytes_;
    for (std::size_t i = 0; i < threads.size(); ++i) {
      const auto place = std::find_if(plan.places.begin(), plan.places.end(), [&](const PlaceMemory& each) {
        return each.name == placements[i].name || each.name.ends_with(" on " + placements[i].name);
      });
      if (place == plan.places.end()) continue;
      place->measured.activations = counts.activations[i + 1] - before.at_begin[i + 1];
      if (plan.strategy != "data_parallel") {
        place->measured.gradients = counts.gradients[i + 1] - before.at_begin[i + 1];
      } else {
        place->measured.peak = watch.made_by(threads[i]).peak;
      }
    }
  }

 private:
  struct Counts {
    Counts(const core::MemoryWatch& watch, const std::vector<std::thread::id>& threads)
        : at_begin{watch.total().now} {
      for (const auto thread : threads) at_begin.push_back(watch.made_by(thread).now);
    }
    std::vector<std::int64_t> at_begin, activations, gradients;
  };

  void step(const core::MemoryWatch& watch, Model& model,
            const std::function<at::Tensor(const at::Tensor&)>& forward, const at::Tensor& input,
            const at::Tensor& target, std::int64_t part, const std::function<void(bool)>& note) {
    model.optimizer->zero_grad();
    for (std::int64_t begin = 0; begin < input.size(0); begin += part) {
      const std::int64_t count = std::min(part, input.size(0) - begin);
      at::Tensor loss = model.loss(forward, input.narrow(0, begin, count), target.narrow(0, begin, count));
      if (note && begin == 0) note(false);
      loss.backward();
      loss.reset();
      if (note) note(true);
    }
    const std::int64_t before = watch.total().now;
    model.optimizer->step();
    if (!note) optimizer_bytes_ = watch.total().now - before;
  }

  const Config& config_;
  const MemoryOptions& options_;
  std::int64_t optimizer_bytes_ = 0;
};

void check(const Config& config, const std::string& strategy, const MemoryOptions& options) {
  if (strategy == "pipeline") {
    throw UsageError(
        kWhere, "a pipeline was asked for, whose activations its schedule decides",
        "distributed.strategy=model_parallel for the rest, and cohort pipeline, which shows how many "
        "micro-batches each placement holds");
  }
  if (strategy == "model_parallel" && options.place.empty()) {
    throw UsageError(
        kWhere, "the strategy is model_parallel, and distributed.place does not say which layers are where",
        "distributed.place.LAYER=cpu:1");
  }
  if (uses_placements(config.distributed) && config.distributed.nproc_per_node > 1) {
    throw UsageError(kWhere,
                     core::concat(strategy, " is planned for one process, got distributed.nproc_per_node ",
                                  config.distributed.nproc_per_node),
                     "distributed.nproc_per_node=1, which is what each rank takes");
  }
  if (!options.place.empty() && strategy == "data_parallel") {
    throw UsageError(kWhere, "layers on placements of their own, and data_parallel, were asked for",
                     "distributed.strategy=single");
  }
  if (!options.measure) return;
  std::vector<core::Placement> placements;
  if (strategy == "data_parallel") placements = placements_of(config.distributed, at::kCPU);
  for (const auto& [name, placement] : options.place) placements.push_back(placement);
  for (const core::Placement& placement : placements) {
    if (!placement.is_cpu()) {
      throw UsageError(kWhere, core::concat("only CPU memory is measured: got placement ", placement.name),
                       "without --measure");
    }
  }
}

}  // namespace

MemoryPlan plan_memory(const Config& config, const MemoryOptions& given) {
  MemoryPlan plan;
  MemoryOptions options = given;
  if (config.distributed.strategy == "model_parallel") {
    for (const auto& [name, placement] : config.distributed.place) {
      options.place.emplace(name, core::Placement::parse(placement));
    }
  }
  plan.model = config.model.name;
  plan.strategy = strategy_of(config);
  plan.num_ranks = has_ranks(plan.strategy) ? int(config.distributed.nproc_per_node) : 1;
  check(config, plan.strategy, options);
  const Sizes sizes(config, plan.num_ranks);
  plan.batch_size = sizes.part;

  std::vector<core::Placement> placements;
  {
    // Placed layers would be seen on other threads: what is kept is the same without.
    Model model(config, {});
    const StepMemory step = probe(model);
    const ModelBytes bytes = model_bytes(model, [](const std::string&) { return true; });
    plan.parameters = bytes.parameters;
    plan.buffers = bytes.buffers;
    list_layers(plan, model, step);
    if (plan.strategy == "data_parallel") {
      placements = placements_of(config.distributed, at::kCPU);
      plan_replicas(plan, config, model, bytes, step, sizes);
    } else if (!options.place.empty()) {
      for (const auto& [name, placement] : options.place) placements.push_back(placement);
      plan_places(plan, model, bytes, step, sizes, options);
    } else {
      const bool ranks = has_ranks(plan.strategy);
      PlaceMemory place{.name = ranks ? core::concat("each of ", plan.num_ranks, " ranks") : "cpu",
                        .samples = sizes.part,
                        .predicted = whole(bytes, model, step, sizes)};
      // Buckets are the gradients, and stay; chunks are copies.
      if (plan.strategy == "average") place.predicted.averages = bytes.gradients;
      if (ranks) *place.predicted.peak += bytes.gradients;
      plan.places.push_back(place);
    }
  }
  if (options.measure) {
    Config alone = config;
    const bool is_placed = plan.strategy == "model_parallel";  // by parallel::place() already
    if (has_ranks(plan.strategy) || is_placed) alone.distributed.strategy = "single";
    Measurement(alone, options).run(plan, sizes, placements);
    // The buffers of averages are not there without the other ranks.
    if (has_ranks(plan.strategy)) plan.places.back().measured.peak.reset();
  }
  return plan;
}

}  // namespace cohort::train
