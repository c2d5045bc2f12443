#include "cohort/train/config_resume.h"

#include <algorithm>

#include "cohort/core/error.h"
#include "cohort/train/config_keys.h"

namespace cohort::train {
namespace {

/// The value on one line.
std::string short_text(const ConfigKey& key, Config& config) {
  const std::string text = value_text(key, config);
  if (!text.starts_with('\n')) return text;
  std::string line;
  for (std::size_t begin = 1; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t first = std::min(text.find_first_not_of(" -", begin), end);
    line += (line.empty() ? "" : ", ") + text.substr(first, end - first);
    begin = end + 1;
  }
  return "{" + line + "}";
}

}  // namespace

std::string check_resume(Config before, Config now, bool same_step, const std::string& from) {
  std::string taken, refused;
  for (const ConfigKey& key : config_keys()) {
    if (key.on_resume == OnResume::kCannotMatter || same_value(key, before, now)) continue;
    const bool is_refused = key.on_resume == OnResume::kRefused || (key.makes_step && !same_step);
    std::string& list = is_refused ? refused : taken;
    list += core::concat(list.empty() ? "" : ", ", key.name, " ", short_text(key, before), " -> ",
                         short_text(key, now));
  }
  if (refused.empty()) return taken;
  throw ConfigError(
      "train.resume",
      core::concat("a run cannot go on with another value of these keys: ", refused, " (", from,
                   " was made with the first)"),
      core::concat("the values that it was made with, or a new run from its weights (model.weights=", from,
                   ")"));
}

}  // namespace cohort::train
