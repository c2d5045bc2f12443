#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/config/keys.h"
#include "cohort/config/yaml_text.h"

namespace cohort::config {

/// Puts values from YAML into a Config, key by key, and says precisely what does not fit.
class ConfigReader {
 public:
  explicit ConfigReader(Config& config) : config_(config) {}

  /// Reads a whole file: sections, flat keys, or both.
  void read_document(const YAML::Node& document, const YamlSource& source);

  /// Applies `section.key=value`, `model.options.NAME=value` or `FLAT_KEY=value`; a later one wins.
  void read_override(const std::string& text);

  /// Whether `section.key` was among what was read, under this name or a flat one.
  bool has_read(std::string_view name) const { return read_.contains(name); }

 private:
  void read_section(const std::string& section, const YAML::Node& node, const YamlSource& source);
  void read_flat(const std::string& name, const YAML::Node& node, const YamlSource& source,
                 const YAML::Mark& mark);
  /// `shown` is what the user wrote: optim.lr or LR.
  void read_key(const ConfigKey& key, const std::string& shown, const YAML::Node& node,
                const YamlSource& source, const YAML::Mark& mark);
  void read_num_gpus(const YAML::Node& node, const YamlSource& source);
  struct SetBy {
    std::string shown;
    std::string where;
    std::string value;
  };
  void note_set(const ConfigKey& key, const std::string& shown, const YamlSource& source,
                const YAML::Mark& mark);
  [[noreturn]] static void fail_two_names(const ConfigKey& key, const SetBy& first, const SetBy& now);

  Config& config_;
  std::set<std::string_view> read_;             ///< names of keys
  std::map<std::string, SetBy> set_by_;         ///< in the file: key to what set it
  std::map<std::string, SetBy> overridden_by_;  ///< by flat names among the overrides: the first
};

}  // namespace cohort::config
