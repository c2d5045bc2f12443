// Tensors of modules and optimizers are named with their owner's name in front; an owner without a name has
// all of them. Everything else is JSON, with numbers and texts that JSON cannot hold written in a form of
// their own. What older versions did not write is read as a default, or as not known.
#include "cohort/train/internal/fit/run_state.h"

#include <nlohmann/json.hpp>

#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/train/internal/fit/state_numbers.h"
#include "cohort/train/internal/json_text.h"

namespace cohort::train {
namespace {

using nlohmann::json;

std::string with_prefix(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Returns the entries whose name begins with `prefix.`, without it; all of them for the empty prefix.
template <typename Entries>
Entries without_prefix(const Entries& entries, const std::string& prefix) {
  if (prefix.empty()) return entries;
  Entries result;
  for (const auto& [name, value] : entries) {
    // With the dot: the module "net" must not take the tensors of "net2".
    if (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.') {
      result.insert(result.end(), {name.substr(prefix.size() + 1), value});
    }
  }
  return result;
}

json to_json(const DataOfRun& data) {
  json classes = json::array();
  for (const std::string& name : data.classes) classes.push_back(text_to_json(name));
  return {{"classes", classes}, {"samples", data.samples}, {"fingerprint", text_to_json(data.fingerprint)}};
}

DataOfRun data_from_json(const json& from) {
  DataOfRun data;
  for (const json& name : from.at("classes")) data.classes.push_back(text_from_json(name));
  data.samples = from.at("samples");
  data.fingerprint = text_from_json(from.at("fingerprint"));
  return data;
}

json to_json(const RunState& state) {
  json meters = json::object();
  for (const auto& [name, sum] : state.meters) {
    meters[name] = sum_to_json(sum);
  }
  // No tensors here: this goes into state.json, which has limits on its size. Names never change, as older
  // checkpoints are still read.
  json data = {
      {"epoch", state.epoch},
      {"step", state.step},
      {"loader", {{"epoch", state.loader.epoch}, {"samples_consumed", state.loader.samples_consumed}}},
      {"meters", meters},
      {"reported_step", state.reported_step},
      {"epoch_seconds", state.epoch_seconds},
      {"wait_seconds", state.wait_seconds},
      {"best", number_to_json(state.best)},
      {"best_epoch", state.best_epoch},
      {"best_metric", state.best_metric},
      {"best_is_highest", state.best_is_highest},
      {"non_finite_steps", state.non_finite_steps},
      {"seed", state.seed},
      {"threads", state.threads},
      {"world_size", state.world_size},
      {"virtual_ranks", state.virtual_ranks},
      {"instruction_set", state.instruction_set},
      {"global_batch_size", state.global_batch_size},
      {"data", to_json(state.data)},
      {"eval_data", to_json(state.eval_data)},
      {"description", text_to_json(state.description)}};
  if (!state.went_back_to.empty()) data["went_back_to"] = text_to_json(state.went_back_to);
  return data;
}

RunState from_json(const json& data) {
  RunState state;
  state.epoch = data.at("epoch");
  state.step = data.at("step");
  state.loader.epoch = data.at("loader").at("epoch");
  state.loader.samples_consumed = data.at("loader").at("samples_consumed");
  for (const auto& [name, sum] : data.at("meters").items()) {
    state.meters[name] = sum_from_json(sum);
  }
  // value() for what the first version did not write; at() for what every version wrote, so its absence is
  // damage.
  state.reported_step = data.value("reported_step", state.step);
  state.epoch_seconds = data.at("epoch_seconds");
  state.wait_seconds = data.at("wait_seconds");
  state.best = number_from_json(data.at("best"));
  state.best_epoch = data.at("best_epoch");
  state.best_metric = data.value("best_metric", "");
  state.best_is_highest = data.value("best_is_highest", true);
  state.non_finite_steps = data.at("non_finite_steps");
  state.seed = data.at("seed");
  state.threads = data.at("threads");
  state.world_size = data.value("world_size", 1);
  state.virtual_ranks = data.value("virtual_ranks", std::int64_t{0});
  state.instruction_set = data.value("instruction_set", "");
  state.global_batch_size = data.at("global_batch_size");
  if (data.contains("data")) state.data = data_from_json(data.at("data"));
  if (data.contains("eval_data")) state.eval_data = data_from_json(data.at("eval_data"));
  if (data.contains("went_back_to")) state.went_back_to = text_from_json(data.at("went_back_to"));
  if (data.contains("description")) state.description = text_from_json(data.at("description"));
  return state;
}

}  // namespace

RunState run_of(const json& state) {
  return read_state("Trainer", [&] { return from_json(state.at("run")); });
}

DataOfRun data_of(const json& state) {
  // Also called for checkpoints of programs without a Trainer, which have no "run".
  const bool is_known = state.contains("run") && state["run"].contains("data");
  return read_state("Trainer", [&] { return is_known ? data_from_json(state["run"]["data"]) : DataOfRun(); });
}

checkpoint::CheckpointContent capture(const Task& task, const RunState& state) {
  checkpoint::CheckpointContent content;
  for (const parallel::NamedModule& entry : task.modules()) {
    for (auto& [name, tensor] : checkpoint::module_state(*entry.module)) {
      content.model.emplace_back(with_prefix(entry.name, name), tensor);
    }
  }
  json optimizers = json::object();
  for (const parallel::NamedOptimizer& entry : task.optimizers()) {
    optim::OptimizerState optimizer = entry.optimizer->state();
    for (auto& [name, tensor] : optimizer.tensors) {
      content.optimizer.emplace_back(with_prefix(entry.name, name), tensor);
    }
    // Tensors go to the file of tensors, numbers to JSON, where a user can read the rates.
    optimizers[entry.name] = numbers_to_json(optimizer.scalars);
  }
  content.state = {{"run", to_json(state)}, {"optimizers", optimizers}};
  return content;
}

void restore_modules(Task& task, const checkpoint::TensorMap& tensors) {
  for (const parallel::NamedModule& entry : task.modules()) {
    checkpoint::load_module_state(*entry.module, without_prefix(tensors, entry.name));
  }
}

RunState restore(Task& task, const checkpoint::CheckpointContent& content) {
  // The larger part first: a checkpoint of another model is rejected before an optimizer has changed.
  restore_modules(task, content.model);
  return read_state("Trainer", [&] {
    const json& optimizers = content.state.at("optimizers");
    for (const parallel::NamedOptimizer& entry : task.optimizers()) {
      optim::OptimizerState state;
      for (const auto& [name, tensor] : without_prefix(content.optimizer, entry.name))
        state.tensors[name] = tensor;
      state.scalars = numbers_from_json(optimizers.at(entry.name));
      entry.optimizer->load_state(state);
    }
    return from_json(content.state.at("run"));
  });
}

}  // namespace cohort::train
