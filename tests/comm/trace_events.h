#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace cohort::test {

/// The events of this name in a file of the timeline, in its order.
inline std::vector<nlohmann::json> events_named(const nlohmann::json& trace, const std::string& name) {
  std::vector<nlohmann::json> found;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("name") == name) found.push_back(event);
  }
  return found;
}

}  // namespace cohort::test
