#pragma once

#include <string>
#include <vector>

#include "cohort/checkpoint/safetensors.h"

namespace torch::nn {
class Module;
}

/// A module's parameters and buffers under the names that PyTorch's `state_dict()` gives them.
namespace cohort::checkpoint {

/// The state of `module` in PyTorch's order: of each module its parameters, then its buffers, then its
/// children.
/// Ownership: the tensors alias the module's (detached). Undefined ones are left out. A tensor that is
/// registered under two names comes twice, as in PyTorch.
TensorMap module_state(const torch::nn::Module& module);

/// What did not fit. Each line names a tensor; `differing` says how.
struct StateDifference {
  std::vector<std::string> missing;     ///< In the module, not in the file.
  std::vector<std::string> unexpected;  ///< In the file, not in the module.
  std::vector<std::string> differing;   ///< In both, with another shape or a dtype that cannot be converted.

  /// Whether everything fits.
  bool empty() const { return missing.empty() && unexpected.empty() && differing.empty(); }
  /// At most ten names of each kind and the number of the others.
  std::string to_text() const;
};

/// Copies `tensors` into the module's own, in place, converting dtype and device and keeping the
/// module's memory format. Names and shapes must agree exactly.
/// Throws: DataError listing what is missing, unexpected and differing; nothing was changed then.
/// UsageError if the module is on the meta device.
void load_module_state(torch::nn::Module& module, const TensorMap& tensors);

/// As load_module_state(), but copies what fits and returns what does not.
StateDifference load_partial(torch::nn::Module& module, const TensorMap& tensors);

}  // namespace cohort::checkpoint
