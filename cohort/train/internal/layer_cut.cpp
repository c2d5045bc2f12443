// Layers get placements by the longest name that matches, or from a balance of layers that are measured on a
// batch. Consecutive layers on the same placement become a part.
#include "cohort/train/internal/layer_cut.h"

#include <ATen/Context.h>

#include <exception>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/layer_entry.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/models/layers.h"
#include "cohort/pipeline/balance.h"
#include "cohort/train/batch_plan.h"

namespace cohort::train {

using parallel::ModelRunnerOptions;

namespace {

using base::concat;

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
    // Of an interleaved pipeline two: they halve its idle time, each further one costs a hand-over more for
    // less.
    options.num_stages *= pipeline::schedule_type(options.schedule).min_stages;
  }
  options.num_micro_batches = static_cast<int>(parts);
  options.optimizer_factor = given.optimizer_states ? given.optimizer_states() : 0;
  options.by_bytes = !in_parts;
  if (!given.example_input) {
    throw UsageError(kWhereRunner, "layers are to be measured, and example_input is not given",
                     "ModelRunnerOptions::example_input, or device_map");
  }
  const at::Tensor batch = given.example_input(in_parts ? micro_batch_size(given) : given.batch_size);
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

}  // namespace

LayerCut::LayerCut(const ModelRunnerOptions& options, const std::shared_ptr<torch::nn::Module>& module,
                   bool in_parts)
    : layers(models::layers_of(module)),
      model(layers),
      placed(options.device_map.empty() ? place_by_measuring(options, devices_of(options), model, in_parts)
                                        : place_by_name(layers, options.device_map)) {}

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

std::int64_t micro_batch_size(const ModelRunnerOptions& given) {
  if (given.micro_batch_size > 0) return given.micro_batch_size;
  if (given.num_micro_batches < 1) {
    throw UsageError(kWhereRunner,
                     concat("num_micro_batches: got ", given.num_micro_batches, ", expected at least 1"));
  }
  return largest_micro_batch(given.batch_size, given.num_micro_batches);
}

}  // namespace cohort::train
