#include "cohort/config/keys.h"

#include "cohort/config/internal/tables.h"

namespace cohort::config {
namespace {

std::vector<ConfigKey> all_keys() {
  std::vector<ConfigKey> keys;
  // This order of sections is the order of dump_config() and of the reference.
  for (auto* part : {model_keys, data_keys, optim_keys, schedule_keys, train_keys, distributed_keys,
                     comm_keys, run_keys}) {
    for (ConfigKey& key : part()) keys.push_back(std::move(key));
  }
  return keys;
}

}  // namespace

std::string_view ConfigKey::section() const {
  const std::string_view whole = name;
  return whole.substr(0, whole.find('.'));
}

std::string_view ConfigKey::short_name() const {
  const std::string_view whole = name;
  return whole.substr(whole.find('.') + 1);
}

std::span<const ConfigKey> config_keys() {
  // Made once and never changed: pointers from find_key() and views of names stay good for the whole process.
  static const std::vector<ConfigKey> keys = all_keys();
  return keys;
}

// About a hundred keys, looked up once for each line of a file: a scan is enough.
const ConfigKey* find_key(std::string_view name) {
  for (const ConfigKey& key : config_keys()) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

std::span<const std::string> config_sections() {
  static const std::vector<std::string> sections = [] {
    std::vector<std::string> names;
    for (const ConfigKey& key : config_keys()) {
      // Keys of a section stand together in the table, so the last name is enough to compare with.
      if (names.empty() || names.back() != key.section()) names.emplace_back(key.section());
    }
    return names;
  }();
  return sections;
}

}  // namespace cohort::config
