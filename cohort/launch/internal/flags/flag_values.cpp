// A flag that is given comes before a variable of torchrun's (PET_NNODES is --nnodes). Its value keeps the
// name that the user gave it by, and errors use that name.
#include "cohort/launch/internal/flags/flag_values.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/launch/run_flags.h"

namespace cohort::launch {

using base::concat;
using std::chrono::milliseconds;

void reject_options(const std::string& what, const std::string& hint) {
  throw UsageError("launch.run", what, hint);
}

std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

void FlagValue::reject(const std::string& expected) const {
  reject_options(concat(name, " is '", text, "', expected ", expected));
}

int FlagValue::integer(int low, int high) const {
  int value = 0;
  if (!read_number(text, value) || value < low || value > high) {
    reject(concat("a whole number from ", low, " to ", high));
  }
  return value;
}

milliseconds FlagValue::seconds(double low) const {
  double value = 0;
  // Not `value < low`: "nan" is read as a number, and compares with nothing.
  if (!read_number(text, value) || !(value >= low) || value > 1e6) {
    reject(concat("seconds, at least ", low));
  }
  return milliseconds(std::llround(value * 1000));
}

bool FlagValue::truth() const {
  std::string word = text;
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto is_in = [&](std::initializer_list<const char*> words) {
    return std::any_of(words.begin(), words.end(), [&](const char* one_of) { return word == one_of; });
  };
  if (is_in({"1", "true", "t", "yes", "y"})) return true;
  if (!is_in({"0", "false", "f", "no", "n"})) reject("true or false");
  return false;
}

// "auto, on or off"
void FlagValue::reject_as_none_of(std::vector<std::string> names) const {
  const std::string last = names.back();
  names.pop_back();
  reject(concat(base::join(names), " or ", last));
}

FlagValues::FlagValues(const std::map<std::string, std::string>& given) : given_(given) {
  for (const RunFlag& flag : run_flags()) {
    // Before all else: a flag that cannot be had says more than what follows from its absence.
    const auto value = get(flag.name);
    if (value && !flag.instead.empty()) reject_options(value->name + " is not available", flag.instead);
  }
}

std::optional<FlagValue> FlagValues::get(const std::string& name) const {
  if (const auto at = given_.find(name); at != given_.end()) return FlagValue{"--" + name, at->second};
  std::string variable = "PET_" + name;
  std::transform(variable.begin(), variable.end(), variable.begin(),
                 [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
  const auto value = base::env_string(variable);
  if (!value) return std::nullopt;
  const RunFlag* flag = find_run_flag(name);
  // A switch: 0 is as if it were not given.
  if (flag->value.empty() && FlagValue{variable, *value}.integer(0, 1) == 0) return std::nullopt;
  return FlagValue{variable, *value};
}

}  // namespace cohort::launch
