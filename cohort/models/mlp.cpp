// Linear layers with ReLUs between them, held in one Stack, so each can be placed by its name. Images are
// flattened; an input that is flat already passes as it is. The sizes come from the option `hidden`, which is
// checked as a whole before a layer is made.
#include "cohort/models/mlp.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/models/internal/checks.h"
#include "cohort/models/layers.h"

namespace cohort::models {
namespace {

std::vector<std::int64_t> parse_hidden(const ModelOptions& options) {
  const auto found = options.extra.find("hidden");
  if (found == options.extra.end()) return {512, 512};
  std::vector<std::int64_t> sizes;
  std::string_view rest = found->second;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    std::int64_t size = 0;
    // The whole item must be a number: "512 " and "5e2" are rejected.
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), size);
    if (error != std::errc() || end != item.data() + item.size() || size < 1) {
      throw UsageError(
          "models.options",
          base::concat(options.name, ": hidden is ", found->second, ", expected sizes of at least 1"),
          "hidden: 512,512 (no spaces)");
    }
    sizes.push_back(size);
    rest.remove_prefix(item.size());
    // A comma at the end is taken as nothing.
    if (!rest.empty()) rest.remove_prefix(1);
  }
  return sizes;
}

std::int64_t input_size(const ModelOptions& options) {
  return options.in_channels * options.image_size * options.image_size;
}

}  // namespace

MLPImpl::MLPImpl(ModelOptions options) : Model<MLPImpl>("MLP"), options_(std::move(options)) {
  check_options(options_, {"hidden"});
  hidden_ = parse_hidden(options_);
  reset();
}

void MLPImpl::reset() {
  namespace nn = torch::nn;
  layers = Stack();
  std::int64_t size = input_size(options_);
  for (const std::int64_t hidden : hidden_) {
    layers->add(nn::Linear(size, hidden));
    layers->add(nn::ReLU(nn::ReLUOptions(true)));
    size = hidden;
  }
  layers->add(nn::Linear(size, options_.num_classes));
  register_module("layers", layers);
}

at::Tensor MLPImpl::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.numel() != input.size(0) * input_size(options_)) {
    throw UsageError("models.forward", base::concat(options_.name, " was built for ", options_.in_channels,
                                                    " x ", options_.image_size, " x ", options_.image_size,
                                                    " values: got an input of shape ", input.sizes()));
  }
  // No view where there is nothing to flatten: it would be one more node of the graph.
  return layers->forward(input.dim() == 2 ? input : input.flatten(1));
}

std::vector<core::NamedLayer> MLPImpl::named_layers() {
  std::vector<core::NamedLayer> all{{"flatten", flatten_layer()}};
  add_layers(all, "layers", *layers);
  return all;
}

}  // namespace cohort::models
