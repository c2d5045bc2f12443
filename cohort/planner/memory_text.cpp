// One table of columns serves text and JSON, so both show the same numbers. A value that was not planned or
// not measured is left out, or is "-": it is never 0. Text has MiB, JSON has bytes. A prediction equal to the
// measurement is called exact, since parameters and the optimizer's state have to be.
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/planner/memory_plan.h"

namespace cohort::planner {
namespace {

struct MemoryColumn {
  const char* name;
  std::optional<std::int64_t> MemoryUse::*bytes;
};

constexpr std::array<MemoryColumn, 8> kColumns{{{"model", &MemoryUse::model},
                                                {"optimizer", &MemoryUse::optimizer},
                                                {"batch", &MemoryUse::batch},
                                                {"activations", &MemoryUse::activations},
                                                {"gradients", &MemoryUse::gradients},
                                                {"averages", &MemoryUse::averages},
                                                {"virtual_ranks", &MemoryUse::virtual_ranks},
                                                {"peak", &MemoryUse::peak}}};

template <typename... Args>
std::string printed(const char* format, Args... args) {
  // A longer line is cut, since names of models and layers have any length.
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, args...);
  return text.data();
}

std::string mib(const std::optional<std::int64_t>& bytes) {
  return bytes ? printed("%.2f", double(*bytes) / (1 << 20)) : "-";
}

std::string error_of(const std::optional<std::int64_t>& predicted,
                     const std::optional<std::int64_t>& measured) {
  if (!predicted || !measured) return "";
  if (*predicted == *measured) return "exact";
  // A share of nothing says nothing.
  if (*measured == 0) return "";
  return printed("%+.2f %%", 100 * (double(*predicted) / double(*measured) - 1));
}

nlohmann::json json_of(const MemoryUse& use) {
  nlohmann::json object = nlohmann::json::object();
  for (const MemoryColumn& column : kColumns) {
    if (const auto& bytes = use.*column.bytes) object[column.name] = *bytes;
  }
  return object;
}

}  // namespace

std::string to_text(const MemoryPlan& plan) {
  std::string text = printed("%s, %s, gradients %s, %d rank%s, %lld samples at once; MiB\n\n",
                             plan.model.c_str(), plan.runner.c_str(), plan.gradients.c_str(), plan.num_ranks,
                             plan.num_ranks == 1 ? "" : "s", static_cast<long long>(plan.batch_size));
  if (!plan.note.empty()) text += plan.note + "\n\n";
  text += printed("%-16s %12s %12s\n", "layer", "parameters", "activations");
  for (const MemoryPlan::Layer& layer : plan.layers) {
    // The layer without a name is what came after the last one.
    text += printed("%-16s %12s %12s\n", layer.name.empty() ? "(loss)" : layer.name.c_str(),
                    mib(layer.parameters).c_str(), mib(layer.activations).c_str());
  }
  for (const PlaceMemory& place : plan.places) {
    text += printed("\n%-28s %12s %12s %10s\n", place.name.c_str(), "predicted", "measured", "");
    for (const MemoryColumn& column : kColumns) {
      const auto& predicted = place.predicted.*column.bytes;
      const auto& measured = place.measured.*column.bytes;
      if (!predicted && !measured) continue;
      text += printed("  %-26s %12s %12s %10s\n", column.name, mib(predicted).c_str(), mib(measured).c_str(),
                      error_of(predicted, measured).c_str());
    }
  }
  return text;
}

std::string to_json(const MemoryPlan& plan) {
  nlohmann::json object{{"model", plan.model},         {"runner", plan.runner},
                        {"gradients", plan.gradients}, {"ranks", plan.num_ranks},
                        {"samples", plan.batch_size},  {"parameters", plan.parameters},
                        {"buffers", plan.buffers}};
  if (!plan.note.empty()) object["note"] = plan.note;
  object["layers"] = nlohmann::json::array();
  for (const MemoryPlan::Layer& layer : plan.layers) {
    object["layers"].push_back(
        {{"name", layer.name}, {"parameters", layer.parameters}, {"activations", layer.activations}});
  }
  object["places"] = nlohmann::json::array();
  for (const PlaceMemory& place : plan.places) {
    object["places"].push_back({{"name", place.name},
                                {"samples", place.samples},
                                {"predicted", json_of(place.predicted)},
                                {"measured", json_of(place.measured)}});
  }
  return object.dump(2) + "\n";
}

}  // namespace cohort::planner
