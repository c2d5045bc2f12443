#include "cohort/train/internal/fit/state_numbers.h"

#include <cmath>
#include <limits>

namespace cohort::train {

using nlohmann::json;

json number_to_json(double value) {
  // JSON has no such numbers, and the library would write null for all three.
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

double number_from_json(const json& value) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "inf") return kInfinity;
  if (value == "-inf") return -kInfinity;
  if (value == "nan" || value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  return value.get<double>();
}

json sum_to_json(const MeterSet::Sum& sum) {
  json list = json::array({number_to_json(sum.weighted), number_to_json(sum.weight)});
  for (const double part : sum.rest) list.push_back(number_to_json(part));
  return list;
}

MeterSet::Sum sum_from_json(const json& list) {
  MeterSet::Sum sum{.weighted = number_from_json(list.at(0)), .weight = number_from_json(list.at(1))};
  for (std::size_t part = 2; part < list.size(); ++part) sum.rest.push_back(number_from_json(list[part]));
  return sum;
}

// By name, so that an option that a later version adds leaves the others where they are.
json numbers_to_json(const std::map<std::string, double>& numbers) {
  json object = json::object();
  for (const auto& [name, value] : numbers) object[name] = number_to_json(value);
  return object;
}

std::map<std::string, double> numbers_from_json(const json& object) {
  std::map<std::string, double> numbers;
  for (const auto& [name, value] : object.items()) numbers[name] = number_from_json(value);
  return numbers;
}

}  // namespace cohort::train
