#pragma once

#include <map>
#include <string>
#include <utility>

/// What is said of a model's layers by name.
namespace cohort::base {

/// Returns the entry of `by_name` for a layer: the longest name that is the layer's, or that the layer's
/// begins with ("layer4" for "layer4.0"); null where there is none.
template <typename T>
const std::pair<const std::string, T>* entry_of_layer(const std::map<std::string, T>& by_name,
                                                      const std::string& layer) {
  const std::pair<const std::string, T>* best = nullptr;
  for (const auto& entry : by_name) {
    const bool covers = layer == entry.first || layer.starts_with(entry.first + ".");
    if (covers && (best == nullptr || entry.first.size() > best->first.size())) best = &entry;
  }
  return best;
}

}  // namespace cohort::base
