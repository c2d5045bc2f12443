#include "cohort/optim/groups.h"

#include <string_view>

namespace cohort::optim {

std::vector<ParamGroup> split_decay(const NamedTensors& parameters, double weight_decay) {
  ParamGroup decay{.name = "decay", .weight_decay = weight_decay};
  ParamGroup no_decay{.name = "no_decay", .weight_decay = 0.0};
  for (const auto& [name, parameter] : parameters) {
    // He et al. 2019, "Bag of Tricks for Image Classification", section 3.1: no decay on biases and on a
    // norm's scale and shift. Both have one dimension; the name covers biases of other shapes.
    const bool plain = parameter.dim() <= 1 || std::string_view(name).ends_with("bias");
    (plain ? no_decay : decay).params.push_back(parameter);
  }
  std::vector<ParamGroup> groups;
  if (!decay.params.empty()) groups.push_back(std::move(decay));
  if (!no_decay.params.empty()) groups.push_back(std::move(no_decay));
  return groups;
}

}  // namespace cohort::optim
