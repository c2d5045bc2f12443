// What the table of keys says about one value: range, words, YAML. Each function visits the member that the
// key points to, and so covers all types of members: a new type does not compile until each function knows
// it. A text written by value_text() is read back to an equal value.
#include <algorithm>
#include <cmath>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/config/keys.h"
#include "cohort/config/yaml_text.h"

namespace cohort::config {
namespace {

using base::concat;

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <typename... F>
Overloaded(F...) -> Overloaded<F...>;

constexpr double kLargest = 1e12;  // a bound above this is only there against overflow: not worth words

std::string range_text(const ConfigKey& key) {
  const bool lower = std::isfinite(key.min) && key.min > -kLargest;
  const bool upper = std::isfinite(key.max) && key.max < kLargest;
  const std::string low = (key.min_is_open ? "> " : ">= ") + number_text(key.min);
  if (lower && upper) return concat(low, " and <= ", number_text(key.max));
  if (lower) return low;
  if (upper) return "<= " + number_text(key.max);
  return "";
}

std::string with_range(const char* what, const ConfigKey& key) {
  const std::string range = range_text(key);
  return range.empty() ? what : concat(what, " ", range);
}

bool in_range(const ConfigKey& key, double value) {
  if (!std::isfinite(value)) return false;
  // NaN and infinity are rejected above, so the comparisons below are those of numbers.
  return (key.min_is_open ? value > key.min : value >= key.min) && value <= key.max;
}

template <typename T>
std::string rejected_item(const ConfigKey& key, const std::vector<T>& values) {
  for (const T value : values) {
    if (!in_range(key, static_cast<double>(value))) return number_text(static_cast<double>(value));
  }
  return "";
}

// No nearest name is looked for here: the reader, which knows what the user wrote, does that.
std::string rejected_text(const ConfigKey& key, const std::string& text) {
  const auto& choices = key.choices;
  const bool chosen = choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end();
  const bool formed = key.matches == nullptr || key.matches(text);
  return chosen && formed ? "" : concat("'", text, "'");
}

template <typename T>
std::string list_text(const std::vector<T>& values) {
  base::TextList list;
  for (const T value : values) {
    if constexpr (std::is_same_v<T, double>) {
      list.add(number_text(value));
    } else {
      list.add(std::to_string(value));
    }
  }
  return "[" + list.text() + "]";
}

// A list of one and a single value read alike, so the shorter text is written.
std::string argument_text(const std::vector<double>& values) {
  return values.size() == 1 ? number_text(values.front()) : list_text(values);
}

std::string transform_text(const TransformConfig& transform) {
  const std::string name = scalar_text(transform.name);
  if (transform.args.empty()) return name;
  // An argument without a name is the only one: "Resize: 64". The reader gives it the empty name.
  if (transform.args.size() == 1 && transform.args.begin()->first.empty()) {
    return concat(name, ": ", argument_text(transform.args.begin()->second));
  }
  base::TextList list;
  for (const auto& [key, values] : transform.args) list.add(scalar_text(key), ": ", argument_text(values));
  return concat(name, ": {", list.text(), "}");
}

std::string transforms_text(const TransformList& transforms) {
  if (!transforms.preset.empty()) return scalar_text(transforms.preset);
  // An empty value would be read as null, which is an error for this type.
  if (transforms.list.empty()) return "[]";
  std::string text;
  for (const TransformConfig& transform : transforms.list) text += "\n    - " + transform_text(transform);
  return text;
}

std::string map_text(const std::map<std::string, std::string>& map) {
  if (map.empty()) return "{}";
  std::string text;
  for (const auto& [key, value] : map) text += concat("\n    ", scalar_text(key), ": ", scalar_text(value));
  return text;
}

}  // namespace

std::string resume_text(const ConfigKey& key) {
  // Before on_resume, which these keys have too: check_resume() rejects them only where steps differ in size.
  if (key.makes_step) return "takes effect; rejected where a step gets another number of samples";
  switch (key.on_resume) {
    case OnResume::kTakesEffect:
      return "takes effect";
    case OnResume::kRejected:
      return "rejected";
    case OnResume::kCannotMatter:
      return "cannot matter";
    case OnResume::kUnset:
      break;
  }
  return "unset";
}

std::string expectation(const ConfigKey& key) {
  if (key.form != nullptr) return key.form;
  const std::string choices = base::join(key.choices);
  // A fresh Config serves only to learn the type of the member.
  Config config;
  return std::visit(
      Overloaded{[](bool*) -> std::string { return "true or false"; },
                 [&](int64_t*) { return with_range("a whole number", key); },
                 [&](double*) { return with_range("a number", key); },
                 [&](std::string*) { return choices.empty() ? std::string("a text") : "one of " + choices; },
                 [&](std::vector<int64_t>*) { return with_range("a list of whole numbers", key); },
                 [&](std::vector<double>*) { return with_range("a list of numbers", key); },
                 [&](TransformList*) {
                   return concat("one of ", choices,
                                 ", or a list such as [RandomHorizontalFlip, {Resize: 64}]");
                 },
                 [](std::map<std::string, std::string>*) -> std::string { return "names with values"; }},
      key.target(config));
}

std::string rejected_value(const ConfigKey& key, Config& config) {
  return std::visit(
      Overloaded{[](bool*) -> std::string { return ""; },
                 [&](int64_t* value) {
                   // Bounds end at 2^53, up to which the conversion to double is exact.
                   return in_range(key, static_cast<double>(*value)) ? "" : std::to_string(*value);
                 },
                 [&](double* value) { return in_range(key, *value) ? "" : number_text(*value); },
                 [&](std::string* value) { return rejected_text(key, *value); },
                 [&](std::vector<int64_t>* values) { return rejected_item(key, *values); },
                 [&](std::vector<double>* values) { return rejected_item(key, *values); },
                 [&](TransformList* value) {
                   return value->preset.empty() ? std::string() : rejected_text(key, value->preset);
                 },
                 [](std::map<std::string, std::string>*) -> std::string { return ""; }},
      key.target(config));
}

std::string value_text(const ConfigKey& key, Config& config) {
  return std::visit(Overloaded{[](bool* value) -> std::string { return *value ? "true" : "false"; },
                               [](int64_t* value) { return std::to_string(*value); },
                               [](double* value) { return number_text(*value); },
                               [](std::string* value) { return scalar_text(*value); },
                               [](std::vector<int64_t>* values) { return list_text(*values); },
                               [](std::vector<double>* values) { return list_text(*values); },
                               [](TransformList* value) { return transforms_text(*value); },
                               [](std::map<std::string, std::string>* value) { return map_text(*value); }},
                    key.target(config));
}

bool same_value(const ConfigKey& key, Config& a, Config& b) {
  return std::visit(
      [](auto* left, auto* right) {
        // One key gives members of one type, but visit() instantiates every pair of types.
        if constexpr (std::is_same_v<decltype(left), decltype(right)>) {
          return *left == *right;
        } else {
          return false;
        }
      },
      key.target(a), key.target(b));
}

}  // namespace cohort::config
