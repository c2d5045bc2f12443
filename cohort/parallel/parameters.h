#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

/// What of a module is averaged over ranks.
namespace cohort::parallel {

/// A parameter as the ranks know it.
struct NamedParameter {
  std::string name;   ///< qualified, as in named_parameters()
  at::Tensor tensor;  ///< shares the module's memory
  /// Its gradient is sparse, as that of an Embedding with sparse(true): rows travel, after backward.
  bool is_sparse = false;
};

/// The parameters of a module that need a gradient, each once, but for those named in `ignored`; sparse are
/// those of Embedding and EmbeddingBag with sparse(true).
/// Throws: UsageError for a name that is no parameter's and no buffer's.
std::vector<NamedParameter> parameters_to_reduce(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored = {});

}  // namespace cohort::parallel
