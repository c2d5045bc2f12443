#pragma once

#include <torch/nn/module.h>

#include <string>

namespace cohort::core {

/// Returns a module's type as its holder is called: "Conv2d" for a torch::nn::Conv2dImpl.
inline std::string module_type(const torch::nn::Module& module) {
  std::string name = module.name();
  if (const auto colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

}  // namespace cohort::core
