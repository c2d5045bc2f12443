// The registry of model runners, with `plain`, which needs no other module. The others register themselves
// where they are built. Always: each runner is wrapped as it is registered, so an exception of its `make`
// says which runner was made. Memory is planned by place: a layer that the device map does not name is where
// forward is called, and this place also has the batch.
#include "cohort/parallel/model_runner.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/error_context.h"
#include "cohort/base/text/layer_entry.h"

namespace cohort::parallel {
namespace {

ModelRunner make_plain(torch::nn::AnyModule model, const ModelRunnerOptions& /*options*/) {
  return {[model = std::move(model)](const at::Tensor& input) mutable {
    return model.forward<at::Tensor>(input);
  }};
}

RunnerMemory plan_plain(const PlainMemory& plain, const ModelRunnerOptions& options) {
  if (!options.device_map.empty()) return memory_by_placement(plain, options.device_map);
  return {{{.name = plain.place, .samples = plain.samples, .use = plain.use}}, MeasuredRun()};
}

base::Registry<ModelRunnerType>& runner_registry() {
  static auto* instance = new base::Registry<ModelRunnerType>("model runner", "parallel.model_runner",
                                                              {{"plain",
                                                                {.make = make_plain,
                                                                 .supports_virtual_ranks = true,
                                                                 .plans_ranks = true,
                                                                 .plans_placed_layers = true,
                                                                 .plan_is_measured = true,
                                                                 .plan_memory = plan_plain}}});
  return *instance;
}

// What `make` throws says which runner it was.
ModelRunnerType checked(const std::string& name, ModelRunnerType type) {
  type.make = [name, make = std::move(type.make)](torch::nn::AnyModule model,
                                                  const ModelRunnerOptions& options) {
    const std::string owner = base::concat("model runner '", name, "'");
    if (!make) throw UsageError("parallel.model_runner", owner + " was registered without make");
    return base::with_context<UsageError>("parallel.model_runner", "making " + owner,
                                          [&] { return make(std::move(model), options); });
  };
  return type;
}

}  // namespace

RunnerMemory memory_by_placement(const PlainMemory& plain,
                                 const std::map<std::string, base::Placement>& device_map) {
  std::vector<std::optional<base::Placement>> placements{std::nullopt};  // none: where forward is called
  for (const auto& [layer, placement] : device_map) {
    if (std::ranges::find(placements, placement) == placements.end()) placements.emplace_back(placement);
  }
  RunnerMemory memory({}, MeasuredRun());
  for (const auto& placement : placements) {
    const auto is_here = [&](const std::string& name) {
      const auto* const entry = base::entry_of_layer(device_map, name);
      return entry == nullptr ? !placement : placement == entry->second;
    };
    PlannedPlace place{.name = placement ? placement->name : "cpu (the rest)",
                       .samples = plain.samples,
                       .use = plain.part(is_here),
                       .placement = placement};
    if (!placement) place.use.batch = plain.use.batch;
    memory.places.push_back(std::move(place));
  }
  memory.all = {.name = "all", .samples = plain.samples, .use = plain.use};
  // Of this process alone: what a gradient sync adds where there are ranks is not of a place.
  MemoryUse& use = memory.all->use;
  use.averages.reset();
  use.peak = *use.model + *use.optimizer + *use.batch + plain.peak(plain.samples) +
             (plain.adds_gradients ? *use.gradients : 0);
  return memory;
}

ModelRunnerType model_runner_type(const std::string& name) {
  return runner_registry().get(name);
}

ModelRunner make_model_runner(torch::nn::AnyModule model, const ModelRunnerOptions& options) {
  ModelRunner runner = model_runner_type(options.name).make(std::move(model), options);
  // Reported here and by name, and not at the first batch.
  if (!runner.forward) {
    throw UsageError("parallel.model_runner",
                     base::concat("the model runner '", options.name, "' was made without forward"));
  }
  return runner;
}

std::vector<std::string> model_runner_names() {
  return runner_registry().names();
}

void register_model_runner(const std::string& name, ModelRunnerType type) {
  if (!type.make) throw UsageError("parallel.model_runner", "a model runner needs make");
  runner_registry().add(name, checked(name, std::move(type)), "register_model_runner");
}

bool register_model_runner_at_load(const char* name, ModelRunnerType type, const char* file,
                                   int line) noexcept {
  return runner_registry().add_at_load(name, checked(name, std::move(type)), file, line);
}

}  // namespace cohort::parallel
