// Tensors go into the checkpoint's maps, and numbers into its JSON. Generators' states lie among the
// optimizer's tensors, under a prefix that its own names may not have. restore() reads every number before it
// changes anything. A generator of a device that the checkpoint does not know keeps its state.
#include "cohort/train/loop_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <map>
#include <mutex>

#include "cohort/checkpoint/state_dict.h"
#include "cohort/train/internal/fit/state_numbers.h"

namespace cohort::train {
namespace {

using nlohmann::json;

// Beside the optimizer's tensors, whose names begin with "state.".
constexpr std::string_view kGenerator = "generator.";

/// The global generators that operators of the model draw from, by the name of their state.
std::map<std::string, at::Generator> generators_of(const torch::nn::Module& model) {
  std::map<std::string, at::Generator> generators;
  const auto add = [&](at::Device device) {
    generators.emplace(std::string(kGenerator) + device.str(), at::globalContext().defaultGenerator(device));
  };
  add(at::kCPU);
  for (const at::Tensor& parameter : model.parameters()) {
    if (!parameter.is_meta()) add(parameter.device());
  }
  return generators;
}

}  // namespace

LoopState::LoopState(torch::nn::Module& model, optim::Optimizer& optimizer, data::Loader& loader)
    : model_(model), optimizer_(optimizer), loader_(loader) {}

checkpoint::CheckpointContent LoopState::content(const json& more) const {
  checkpoint::CheckpointContent content;
  content.model = checkpoint::module_state(model_);
  const optim::OptimizerState optimizer = optimizer_.state();
  for (const auto& [name, tensor] : optimizer.tensors) {
    if (name.starts_with(kGenerator)) {
      throw UsageError("train.LoopState", base::concat("the optimizer has a state of the name ", name),
                       "another name than generator.*");
    }
    content.optimizer.emplace_back(name, tensor);
  }
  for (auto& [name, generator] : generators_of(model_)) {
    const std::lock_guard lock(generator.mutex());
    content.optimizer.emplace_back(name, generator.get_state());
  }
  const data::LoaderState loader = loader_.state();
  content.state = {{"loop",
                    {{"step", step},
                     {"loader",
                      {{"epoch", loader.epoch},
                       {"samples_consumed", loader.samples_consumed},
                       {"dataset_size", loader.dataset_size}}},
                     {"optimizer", numbers_to_json(optimizer.scalars)},
                     {"more", more}}}};
  return content;
}

json LoopState::restore(const checkpoint::CheckpointContent& content) {
  return read_state("LoopState", [&] {
    const json& loop = content.state.at("loop");
    optim::OptimizerState optimizer;
    optimizer.scalars = numbers_from_json(loop.at("optimizer"));
    std::map<std::string, at::Tensor> generators;
    for (const auto& [name, tensor] : content.optimizer) {
      (name.starts_with(kGenerator) ? generators : optimizer.tensors)[name] = tensor;
    }
    const json& loader = loop.at("loader");
    const data::LoaderState position{.epoch = loader.at("epoch"),
                                     .samples_consumed = loader.at("samples_consumed"),
                                     .dataset_size = loader.at("dataset_size")};
    const auto next_step = loop.at("step").get<std::int64_t>();
    json more = loop.at("more");

    // Everything above only reads. Below, each call changes all of its part or throws before it changes any.
    checkpoint::load_module_state(model_, content.model);
    optimizer_.load_state(optimizer);
    loader_.restore(position);
    for (auto& [name, generator] : generators_of(model_)) {
      const auto found = generators.find(name);  // on another device than before: what it draws is new
      if (found == generators.end()) continue;
      const std::lock_guard lock(generator.mutex());
      // A copy: the tensor may be a view of the mapped file, which the generator would keep open.
      generator.set_state(found->second.clone());
    }
    step = next_step;
    return more;
  });
}

}  // namespace cohort::train
