// Every kind of model becomes a list of layers, each a function from values to a value. Values stay
// LibTorch's AnyValue from layer to layer, and become tensors only after the last. With a random key each
// layer draws from a generator of its own, by its number in the whole model. So random numbers do not depend
// on where the model is cut.
#include "cohort/pipeline/stage.h"

#include <c10/util/Type.h>

#include <tuple>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/core/module_type.h"

namespace cohort::pipeline {
namespace {

using base::concat;
using torch::nn::AnyModule;
using torch::nn::AnyValue;
constexpr const char* kWhereStage = "pipeline.stage";

AnyValue call(AnyModule& module, std::span<AnyValue> in) {
  // any_forward() takes arguments and no list, so each number of them has a line.
  switch (in.size()) {
    case 1:
      return module.any_forward(std::move(in[0]));
    case 2:
      return module.any_forward(std::move(in[0]), std::move(in[1]));
    case 3:
      return module.any_forward(std::move(in[0]), std::move(in[1]), std::move(in[2]));
    case 4:
      return module.any_forward(std::move(in[0]), std::move(in[1]), std::move(in[2]), std::move(in[3]));
    default:
      throw UsageError(kWhereStage, concat("a module got ", in.size(), " tensors, expected 1 to 4"),
                       "a function as the stage");
  }
}

Stage::Layer layer_of(std::string name, AnyModule module) {
  // The module itself, for its parameters. The function holds the AnyModule that calls it.
  auto held = module.ptr();
  return {std::move(name), std::move(held),
          [module = std::move(module)](std::span<AnyValue> in) mutable { return call(module, in); }};
}

Stage::Layer layer_of(std::string name, const core::AnyLayer& layer) {
  return {std::move(name), layer.ptr(), [layer](std::span<AnyValue> in) {
            if (in.size() != 1)
              throw UsageError(kWhereStage, concat("a layer got ", in.size(), " tensors, expected 1"));
            return AnyValue(layer.forward(in[0].get<at::Tensor>()));
          }};
}

template <typename... Each>
bool take_tuple(AnyValue& value, Tensors& tensors) {
  auto* const tuple = value.try_get<std::tuple<Each...>>();
  if (tuple == nullptr) return false;
  std::apply([&](const Each&... each) { tensors = {each...}; }, *tuple);
  return true;
}

}  // namespace

Tensors tensors_of(AnyValue& value) {
  using T = at::Tensor;
  Tensors tensors;
  if (auto* const tensor = value.try_get<T>()) return {*tensor};
  if (auto* const list = value.try_get<Tensors>()) return *list;
  if (take_tuple<T, T>(value, tensors) || take_tuple<T, T, T>(value, tensors) ||
      take_tuple<T, T, T, T>(value, tensors)) {
    return tensors;
  }
  // What nn::LSTM returns: the output, and the pair of hidden and cell state.
  if (auto* const lstm = value.try_get<std::tuple<T, std::tuple<T, T>>>()) {
    return {std::get<0>(*lstm), std::get<0>(std::get<1>(*lstm)), std::get<1>(std::get<1>(*lstm))};
  }
  throw UsageError(kWhereStage, concat("got a result of type ", c10::demangle(value.type_info().name()),
                                       ", expected a tensor, a vector of tensors or a tuple of 2 to 4"));
}

Stage::Stage(torch::nn::Sequential layers) : name_("Sequential"), is_list_(true) {
  if (layers->is_empty())
    throw UsageError(kWhereStage, "got a Sequential without layers, expected at least one");
  // A Sequential's own list has no names. Its children do, in the same order.
  const auto children = layers->named_children();
  std::size_t i = 0;
  for (AnyModule& module : *layers) layers_.push_back(layer_of(children[i++].key(), module));
}

Stage::Stage(const std::vector<core::NamedLayer>& layers) : name_("layers"), is_list_(true) {
  if (layers.empty()) throw UsageError(kWhereStage, "got no layers, expected at least one");
  for (const auto& [name, layer] : layers) layers_.push_back(layer_of(name, layer));
}

Stage::Stage(const core::AnyLayer& layer) : name_(core::module_type(*layer.ptr())) {
  layers_.push_back(layer_of(name_, layer));
}

Stage::Stage(AnyModule module) : name_(core::module_type(*module.ptr())) {
  layers_.push_back(layer_of(name_, std::move(module)));
}

Stage::Stage(Function function, Tensors parameters, Tensors buffers)
    : name_("function"), parameters_(std::move(parameters)), buffers_(std::move(buffers)) {
  layers_.push_back({name_, nullptr, [function = std::move(function)](std::span<AnyValue> in) {
                       Tensors inputs;
                       for (AnyValue& value : in) inputs.push_back(value.get<at::Tensor>());
                       return AnyValue(function(inputs));
                     }});
}

Stage Stage::remote() {
  Stage stage;
  // No layers: the rank that has them computes.
  stage.name_ = "remote";
  return stage;
}

Stage& Stage::name(std::string name) {
  name_ = std::move(name);
  return *this;
}

Stage& Stage::recompute(bool recompute) {
  recompute_ = recompute;
  return *this;
}

Tensors Stage::parameters() const {
  // A tied parameter stands here once for each use.
  Tensors all = parameters_;
  for (const Layer& layer : layers_) {
    if (!layer.module) continue;
    for (const at::Tensor& parameter : layer.module->parameters()) all.push_back(parameter);
  }
  return all;
}

Tensors Stage::buffers() const {
  Tensors all = buffers_;
  for (const Layer& layer : layers_) {
    if (!layer.module) continue;
    for (const at::Tensor& buffer : layer.module->buffers()) all.push_back(buffer);
  }
  return all;
}

void Stage::to(c10::Device device) {
  device_ = device;
  // A function has captured its tensors: to move the handles that are here would not move those.
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.device() == device) continue;
    throw UsageError(kWhereStage,
                     concat("a parameter of stage ", name_, ", a function, is on ", parameter.device(),
                            ", expected ", device),
                     "move it there before the pipeline is made");
  }
  for (const Layer& layer : layers_) {
    if (layer.module) layer.module->to(device);
  }
}

Stage Stage::part(std::size_t first, std::size_t last) const {
  if (!is_list_) {
    throw UsageError(
        kWhereStage,
        concat("cannot take layers ", first, " to ", last, ": got ", name_, ", expected a list of layers"),
        "a Sequential, a LayerList or a stage per part");
  }
  if (first >= last || last > layers_.size()) {
    throw UsageError(kWhereStage, concat("got layers ", first, " to ", last, " of ", name_,
                                         ", expected some of its ", layers_.size()));
  }
  Stage stage;
  stage.name_ = name_;
  stage.device_ = device_;
  stage.is_list_ = true;
  stage.recompute_ = recompute_;
  stage.layers_.assign(layers_.begin() + static_cast<std::ptrdiff_t>(first),
                       layers_.begin() + static_cast<std::ptrdiff_t>(last));
  return stage;
}

Tensors Stage::forward(const Tensors& inputs, std::size_t first, std::size_t last,
                       const std::optional<core::RandomKey>& random) const {
  std::vector<AnyValue> values;
  for (const at::Tensor& input : inputs) values.emplace_back(input);
  for (std::size_t i = first; i < last; ++i) {
    std::optional<core::RandomScope> scope;
    if (random) {
      core::RandomKey key = *random;
      // The key has the number of the stage's first layer in the whole model.
      key.layer += i;
      scope.emplace(key, device_);
    }
    AnyValue result = layers_[i].forward(values);
    // Freed before the next layer runs, as in a plain Sequential.
    values.clear();
    values.push_back(std::move(result));
  }
  return tensors_of(values.front());
}

}  // namespace cohort::pipeline
