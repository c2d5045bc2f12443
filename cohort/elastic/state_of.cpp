#include "cohort/elastic/state_of.h"

#include <ATen/core/grad_mode.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"

namespace cohort::elastic {
namespace {

using nlohmann::json;

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

StateSnapshot save_state(const torch::nn::Module& module, optim::Optimizer& optimizer) {
  StateSnapshot snapshot;
  json names = json::array();
  for (const at::Tensor& tensor : tensors_of(module)) snapshot.tensors.push_back(tensor.detach());
  const std::size_t num_module = snapshot.tensors.size();
  const optim::OptimizerState state = optimizer.state();
  for (const auto& [name, tensor] : state.tensors) {
    names.push_back(name);
    snapshot.tensors.push_back(tensor);
  }
  snapshot.text = json({{"module", num_module}, {"names", names}, {"scalars", state.scalars}}).dump();
  return snapshot;
}

void load_snapshot(const StateSnapshot& snapshot, const torch::nn::Module& module,
                   optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> own = tensors_of(module);
  const auto text = base::parse_bounded_json(snapshot.text);
  const bool fits = text && text->value("module", std::size_t{0}) == own.size() &&
                    own.size() + text->at("names").size() == snapshot.tensors.size();
  if (!fits) {
    throw DataError(
        "elastic.state",
        base::concat("a state of ", snapshot.tensors.size(), " tensors came, for a module of ", own.size()),
        "the same model on all processes");
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    at::Tensor to = own[i];
    // In many cases it has been written already.
    if (to.const_data_ptr() != snapshot.tensors[i].const_data_ptr()) to.copy_(snapshot.tensors[i]);
  }
  optim::OptimizerState state;
  state.scalars = text->at("scalars").get<std::map<std::string, double>>();
  std::size_t next = own.size();
  for (const json& name : text->at("names")) {
    state.tensors.emplace(name.get<std::string>(), snapshot.tensors[next++]);
  }
  optimizer.load_state(state);
}

}  // namespace

StateAccess state_of(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<optim::Optimizer> optimizer) {
  return {
      .save = [module, optimizer] { return save_state(*module, *optimizer); },
      .load = [module, optimizer](const StateSnapshot& state) { load_snapshot(state, *module, *optimizer); }};
}

}  // namespace cohort::elastic
