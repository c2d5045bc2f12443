#include "cohort/config/resume.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/config/keys.h"

namespace cohort::config {
namespace {

using namespace std::string_view_literals;

/// The value on one line.
std::string short_text(const ConfigKey& key, Config& config) {
  const std::string text = value_text(key, config);
  if (!text.starts_with('\n')) return text;
  base::TextList line;
  // value_text() puts a list or a map on lines of its own, for a dump. A message has one line, so the dashes
  // and the indentation go.
  for (std::size_t begin = 1; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t first = std::min(text.find_first_not_of(" -", begin), end);
    line.add(text.substr(first, end - first));
    begin = end + 1;
  }
  return "{" + line.text() + "}";
}

/// Adds "KEY VALUE -> VALUE" to `list`.
void add_change(base::TextList& list, const ConfigKey& key, Config& before, Config& now) {
  list.add(key.name, " ", short_text(key, before), " -> ", short_text(key, now));
}

}  // namespace

// All rejected keys go into one error: who mends one key must not start again to learn the next.
// Configurations are taken by value, as a key gives access to its member only through a Config that can be
// changed.
std::string check_resume(Config before, Config now, bool same_step, const std::string& from) {
  base::TextList taken, rejected;
  for (const ConfigKey& key : config_keys()) {
    if (key.on_resume == OnResume::kCannotMatter || same_value(key, before, now)) continue;
    // Batch size, accumulation and ranks may change together where the step keeps its number of samples. Then
    // steps, schedule and learning rate still mean the same.
    const bool is_rejected = key.on_resume == OnResume::kRejected || (key.makes_step && !same_step);
    add_change(is_rejected ? rejected : taken, key, before, now);
  }
  if (rejected.empty()) return taken.text();
  throw ConfigError(
      "train.resume",
      base::concat("a run cannot resume with another value of these keys: ", rejected.text(), " (", from,
                   " was made with the first)"),
      base::concat("the values that it was made with, or a new run from its weights (model.weights=", from,
                   ")"));
}

std::string other_inputs(Config trained, Config now) {
  // Keys that change the numbers which the model gets or computes with. Paths and sizes of batches are left
  // out: to evaluate on other data is what the command is for.
  static constexpr std::array kInputs = {"data.color"sv,     "data.image_size"sv, "data.val_transforms"sv,
                                         "data.mean"sv,      "data.std"sv,        "data.options"sv,
                                         "train.precision"sv};
  base::TextList changes;
  for (const ConfigKey& key : config_keys()) {
    const bool is_of_model = key.section() == "model" && key.on_resume == OnResume::kRejected;
    if (!is_of_model && std::ranges::find(kInputs, key.name) == kInputs.end()) continue;
    if (!same_value(key, trained, now)) add_change(changes, key, trained, now);
  }
  return changes.text();
}

}  // namespace cohort::config
