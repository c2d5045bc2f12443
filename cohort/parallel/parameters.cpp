#include "cohort/parallel/parameters.h"

#include <torch/nn/modules/embedding.h>

#include <unordered_set>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

std::unordered_set<const at::TensorImpl*> sparse_weights(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> weights;
  const auto collect = [&](const torch::nn::Module& part) {
    // No gradient has come yet: only the options say that it will be sparse.
    const auto* const embedding = part.as<torch::nn::EmbeddingImpl>();
    const auto* const bag = part.as<torch::nn::EmbeddingBagImpl>();
    if (embedding != nullptr && embedding->options.sparse()) {
      weights.insert(embedding->weight.unsafeGetTensorImpl());
    }
    if (bag != nullptr && bag->options.sparse()) weights.insert(bag->weight.unsafeGetTensorImpl());
  };
  collect(module);
  for (const auto& part : module.modules(/*include_self=*/false)) collect(*part);
  return weights;
}

}  // namespace

std::vector<NamedParameter> parameters_to_reduce(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored) {
  std::vector<NamedParameter> list;
  std::unordered_set<const at::TensorImpl*> seen;
  std::unordered_set<std::string> left(ignored.begin(), ignored.end());
  const std::unordered_set<const at::TensorImpl*> sparse = sparse_weights(module);
  for (const auto& entry : module.named_parameters()) {
    const at::TensorImpl* const tensor = entry.value().unsafeGetTensorImpl();
    const bool is_ignored = left.erase(entry.key()) > 0;
    // A tied parameter has several names and one gradient.
    if (!entry.value().requires_grad() || !seen.insert(tensor).second) continue;
    if (!is_ignored) list.push_back({entry.key(), entry.value(), sparse.contains(tensor)});
  }
  for (const auto& entry : module.named_buffers()) left.erase(entry.key());
  if (!left.empty()) {
    throw UsageError("parallel.reduce", base::concat("there is no \"", *left.begin(), "\" to ignore"));
  }
  return list;
}

}  // namespace cohort::parallel
