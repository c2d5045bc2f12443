// One table serves the error and the translation. A row says what one key, with one value or any, is written
// as today. A key that became two has a row for each value that it took. A row stays as long as checkpoints
// of its time are to be read. A row whose key stays, such as data.color, renames a value only.
#include "cohort/config/renamed_keys.h"

#include <array>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::config {
namespace {

struct Setting {
  const char* key;
  const char* value = nullptr;  ///< null: any, and the value stays
};

struct Rename {
  Setting before;
  std::vector<Setting> now;
};

const std::vector<Rename>& renames() {
  static const std::vector<Rename> kRenames = {
      {{"data.kind"}, {{"data.type"}}},
      {{"data.color", "grey"}, {{"data.color", "gray"}}},
      {{"data.uneven"}, {{"data.last_batch"}}},
      {{"data.on_error", "refuse"}, {{"data.on_error", "raise"}}},
      {{"data.empty_class", "refuse"}, {{"data.empty_class", "raise"}}},
      {{"data.on_other_files", "refuse"}, {{"data.on_other_files", "raise"}}},
      {{"train.nan"}, {{"train.on_nonfinite"}}},
      {{"distributed.strategy", "auto"}, {{"distributed.model", "plain"}, {"distributed.gradients", "auto"}}},
      {{"distributed.strategy", "single"},
       {{"distributed.model", "plain"}, {"distributed.gradients", "none"}}},
      {{"distributed.strategy", "average"},
       {{"distributed.model", "plain"}, {"distributed.gradients", "average"}}},
      {{"distributed.strategy", "ddp"}, {{"distributed.model", "plain"}, {"distributed.gradients", "ddp"}}},
      {{"distributed.strategy", "data_parallel"},
       {{"distributed.model", "data_parallel"}, {"distributed.gradients", "auto"}}},
      {{"distributed.strategy", "model_parallel"},
       {{"distributed.model", "model_parallel"}, {"distributed.gradients", "auto"}}},
      {{"distributed.strategy", "pipeline"},
       {{"distributed.model", "pipeline"}, {"distributed.gradients", "auto"}}},
      {{"distributed.placements"}, {{"distributed.devices"}}},
      {{"distributed.place"}, {{"distributed.device_map"}}},
      {{"comm.check"}, {{"comm.check_consistency"}}},
      {{"run.images"}, {{"run.log_images"}}},
  };
  return kRenames;
}

const Rename* find_rename(std::string_view key, std::string_view value) {
  for (const Rename& rename : renames()) {
    const char* const only = rename.before.value;
    if (key == rename.before.key && (only == nullptr || value == only)) return &rename;
  }
  return nullptr;
}

std::string_view after_dot(std::string_view name) {
  return name.substr(name.find('.') + 1);
}

}  // namespace

// `value` decides which row counts. An empty `value` matches only rows that take any value.
std::string renamed_to(std::string_view key, std::string_view value) {
  constexpr std::string_view kMap = "distributed.place";  // an entry of a map goes with the map
  if (key.starts_with(kMap) && key.substr(kMap.size()).starts_with('.')) {
    return base::concat(find_rename(kMap, "")->now.front().key, key.substr(kMap.size()), ": ", value);
  }
  const Rename* const rename = find_rename(key, value);
  if (rename == nullptr) {
    // A key of rows that each have one value: the value is none that the key ever took.
    base::TextList names(" and ");
    for (const Rename& row : renames()) {
      // A row that renames a value only says nothing of the key, which is known today.
      if (key != row.before.key || row.now.front().key == key) continue;
      for (const Setting& setting : row.now) names.add(setting.key);
      break;
    }
    return names.text();
  }
  base::TextList list;
  for (const Setting& setting : rename->now) {
    const std::string_view now = setting.value == nullptr ? value : std::string_view(setting.value);
    list.add(setting.key, now.empty() ? "" : ": ", now);
  }
  return list.text();
}

YAML::Node translate_renamed_keys(const YAML::Node& document) {
  if (!document.IsMap()) return document;
  YAML::Node translated(YAML::NodeType::Map);
  for (const auto& section : document) {
    // Flat keys and what is no section: the reader says what is wrong with them.
    if (!section.second.IsMap() || !section.first.IsScalar()) {
      translated.force_insert(section.first, section.second);
      continue;
    }
    // force_insert keeps a key that stands twice, so that the reader still sees and rejects it. A value
    // that moves keeps its mark, so an error names its line in the file.
    YAML::Node keys(YAML::NodeType::Map);
    for (const auto& item : section.second) {
      const std::string key =
          base::concat(section.first.Scalar(), ".", item.first.IsScalar() ? item.first.Scalar() : "");
      const Rename* const rename = find_rename(key, item.second.IsScalar() ? item.second.Scalar() : "");
      if (rename == nullptr) {
        keys.force_insert(item.first, item.second);
        continue;
      }
      for (const Setting& setting : rename->now) {
        const YAML::Node value = setting.value == nullptr ? item.second : YAML::Node(setting.value);
        keys.force_insert(std::string(after_dot(setting.key)), value);
      }
    }
    translated.force_insert(section.first, keys);
  }
  return translated;
}

}  // namespace cohort::config
