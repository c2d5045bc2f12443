// A text has the names of the optimizer's tensors and its numbers, as bits: JSON has no NaN and no infinity.
// Tensors of the module alias the live ones, so that a state which comes is mostly written in place.
#include "cohort/elastic/state_of.h"

#include <ATen/core/grad_mode.h>

#include <bit>
#include <cstdint>
#include <exception>
#include <map>
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
  snapshot.in_place.assign(module.parameters().size(), true);
  snapshot.in_place.resize(num_module, false);  // buffers: forward changes them
  const optim::OptimizerState state = optimizer.state();
  for (const auto& [name, tensor] : state.tensors) {
    names.push_back(name);
    snapshot.tensors.push_back(tensor);
    snapshot.in_place.push_back(true);
  }
  json scalars = json::object();
  for (const auto& [name, value] : state.scalars) scalars[name] = std::bit_cast<std::uint64_t>(value);
  snapshot.text = json({{"module", num_module}, {"names", names}, {"scalars", scalars}}).dump();
  return snapshot;
}

/// What a text of save_state() says.
struct StateText {
  std::size_t num_module = 0;
  std::vector<std::string> names;
  std::map<std::string, double> scalars;
};

StateText read_text(const std::string& text) {
  const auto value = base::parse_bounded_json(text);
  StateText state;
  try {
    state.num_module = value.value().at("module");
    state.names = value->at("names").get<std::vector<std::string>>();
    for (const auto& [name, bits] : value->at("scalars").items()) {
      state.scalars[name] = std::bit_cast<double>(bits.get<std::uint64_t>());
    }
  } catch (const std::exception& error) {
    throw DataError("elastic.state", base::concat("the text of a state cannot be read: ", error.what()),
                    "the same program, and the same version of Cohort, on all hosts");
  }
  return state;
}

void load_snapshot(const StateSnapshot& snapshot, const torch::nn::Module& module,
                   optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> own = tensors_of(module);
  const StateText text = read_text(snapshot.text);
  if (text.num_module != own.size() || own.size() + text.names.size() != snapshot.tensors.size()) {
    throw DataError(
        "elastic.state",
        base::concat("a state of ", snapshot.tensors.size(), " tensors came, for a module of ", own.size()),
        "the same model on all processes");
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    at::Tensor to = own[i];
    const at::Tensor& from = snapshot.tensors[i];
    if (to.sizes() != from.sizes()) {
      throw DataError(
          "elastic.state",
          base::concat("tensor ", i, " of a state has the sizes ", from.sizes(), ", expected ", to.sizes()),
          "the same model on all processes");
    }
    // In many cases it has been written already.
    if (to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
  }
  optim::OptimizerState state;
  state.scalars = text.scalars;
  for (std::size_t i = 0; i < text.names.size(); ++i) {
    state.tensors.emplace(text.names[i], snapshot.tensors[own.size() + i]);
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
