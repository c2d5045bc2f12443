#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/train/metrics.h"

/// Numbers and optimizers' options in a checkpoint's state.json. Internal to this module.
namespace cohort::train {

/// JSON has no NaN and no infinity: they are texts.
nlohmann::json number_to_json(double value);
/// Takes null too, for NaN: what older versions wrote of any number that is not finite.
double number_from_json(const nlohmann::json& value);

/// A sum without rounding.
nlohmann::json sum_to_json(const MeterSet::Sum& sum);
/// Takes what older versions wrote too: two numbers.
MeterSet::Sum sum_from_json(const nlohmann::json& list);

nlohmann::json numbers_to_json(const std::map<std::string, double>& numbers);
std::map<std::string, double> numbers_from_json(const nlohmann::json& object);

/// Returns what `read` makes of a checkpoint's state, which `writer` writes. Throws: DataError where it lacks
/// what `read` asks for.
template <typename Read>
auto read_state(const char* writer, const Read& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception& error) {
    throw DataError(
        "train.resume",
        base::concat("the checkpoint's state.json lacks what ", writer, " needs (", error.what(), ")"),
        "a checkpoint that it wrote, or the parameters of this one alone (model.weights, "
        "checkpoint::load_module_state)");
  }
}

}  // namespace cohort::train
