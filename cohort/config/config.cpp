// A configuration is read in order: defaults, the file, overrides; then everything that spans several keys is
// checked. The tables of keys drive the checks, the dump and the warnings for keys without effect, so these
// cannot disagree. The file is read up to a limit only, since its name may be that of a device without an
// end.
#include "cohort/config/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cohort/base/error.h"
#include "cohort/config/best_metric.h"
#include "cohort/config/internal/flat_keys.h"
#include "cohort/config/internal/reader.h"
#include "cohort/config/renamed_keys.h"
#include "cohort/config/yaml_text.h"

namespace cohort::config {
namespace {

using base::concat;

[[noreturn]] void fail(const std::string& what, const std::string& hint = "") {
  throw ConfigError("config.load", what, hint);
}

// The reader checks each value when it reads it. A Config that a program made, or a command changed, has not
// passed the reader.
void check_values(Config& config) {
  for (const ConfigKey& key : config_keys()) {
    const std::string rejected = rejected_value(key, config);
    if (!rejected.empty()) fail(concat(key.name, ": got ", rejected, ", expected ", expectation(key)));
  }
}

void check_data(const DataConfig& data) {
  if (data.mean.size() != data.std.size()) {
    fail(concat("data.mean has ", data.mean.size(), " numbers and data.std has ", data.std.size(),
                ": expected as many in both"));
  }
  // A data set of a plug-in may make any number of channels, so only the image folder's is checked.
  const auto channels = static_cast<std::size_t>(image_channels(data));
  if (is_image_folder(data) && !data.mean.empty() && data.mean.size() != channels) {
    fail(concat("data.mean has ", data.mean.size(), " numbers: expected ", channels,
                ", one per channel of data.color ", data.color));
  }
}

/// Whether the table of keys says that `key` is used with the other values of `config`. A check that is of
/// some registered names asks a key that only these use, so that each name stands once, in the table.
bool has_effect(const ConfigKey& key, Config& config) {
  if (key.used_with == nullptr) return true;
  // Each used_with is the name of a text key, and each used_above_zero that of a whole number. So neither
  // the pointer nor the variant can miss.
  const std::string value = *std::get<std::string*>(find_key(key.used_with)->target(config));
  const auto lists = [&](const std::vector<std::string>& values) {
    return std::ranges::find(values, value) != values.end();
  };
  if (key.used_values.empty() ? !lists(key.unused_values) : lists(key.used_values)) return true;
  return key.used_above_zero != nullptr &&
         *std::get<std::int64_t*>(find_key(key.used_above_zero)->target(config)) > 0;
}

void check_optim(Config& config) {
  const OptimConfig& optim = config.optim;
  if (optim.betas.size() != 2) fail(concat("optim.betas has ", optim.betas.size(), " numbers: expected 2"));
  if (optim.nesterov && optim.momentum == 0 && has_effect(*find_key("optim.nesterov"), config)) {
    fail("optim.nesterov is true and optim.momentum is 0: expected momentum above 0", "optim.momentum=0.9");
  }
}

void check_schedule(Config& config) {
  const ScheduleConfig& schedule = config.schedule;
  const int warmups =
      (schedule.warmup_epochs > 0) + (schedule.warmup_steps > 0) + (schedule.warmup_fraction > 0);
  if (warmups > 1) {
    fail("more than one of schedule.warmup_epochs, warmup_steps and warmup_fraction is set",
         "one of them only");
  }
  // pct_start is the length of a schedule's own warm-up: two would multiply.
  if (warmups > 0 && has_effect(*find_key("schedule.pct_start"), config)) {
    fail(concat("schedule.", schedule.name, " has a warm-up of its own: expected no schedule.warmup_*"),
         "schedule.pct_start");
  }
  // A schedule counts the milestones that it has passed; equal or falling ones are a typing error.
  const auto& milestones = schedule.milestones;
  if (std::adjacent_find(milestones.begin(), milestones.end(), std::greater_equal<>()) != milestones.end()) {
    fail("schedule.milestones: expected numbers that rise");
  }
}

// Before training: after hours of it nobody should learn that best pointed at the worst epoch.
void check_best(const RunConfig& run) {
  if (run.best_mode != "auto" || more_is_better(run.best_metric)) return;
  fail(concat("run.best_metric is ", run.best_metric,
              ", and the name does not say whether more of it is better"),
       "run.best_mode=max or run.best_mode=min");
}

/// Says which settings differ from their default but have no effect here.
void warn_unused(Config& config) {
  Config defaults;
  for (const ConfigKey& key : config_keys()) {
    if (same_value(key, config, defaults) || has_effect(key, config)) continue;
    // A configuration is checked again after each change, and must not warn twice of one key.
    const std::string value = *std::get<std::string*>(find_key(key.used_with)->target(config));
    const std::string warning = concat(key.name, " has no effect with ", key.used_with, " ", value);
    if (std::ranges::find(config.warnings, warning) == config.warnings.end()) {
      config.warnings.push_back(warning);
    }
  }
}

/// Processes of an elastic run have links of their own, and no process group.
void warn_unused_by_elastic(Config& config) {
  if (!config.distributed.elastic) return;
  Config defaults;
  for (const char* name : {"distributed.backend", "comm.check_consistency"}) {
    if (same_value(*find_key(name), config, defaults)) continue;
    const std::string warning = concat(name, " has no effect with distributed.elastic true");
    if (std::ranges::find(config.warnings, warning) == config.warnings.end()) {
      config.warnings.push_back(warning);
    }
  }
}

}  // namespace

namespace {

Config load(std::string_view text, const std::string& name, const std::vector<std::string>& overrides,
            bool is_written_by_cohort) {
  Config config;
  const YamlSource source{name, false};
  // The repair comes first: "LR:0.1" is no key to YAML, so no later stage could mend it.
  YAML::Node document = parse_yaml(repair_flat_text(text, name, config.warnings), source);
  // A file that the user edits gets an error with the new key instead: they can learn the new name. A
  // run folder's file of an earlier version must still resume.
  if (is_written_by_cohort) document = translate_renamed_keys(document);
  ConfigReader reader(config);
  reader.read_document(document, source);
  for (const std::string& override_text : overrides) reader.read_override(override_text);
  // After the overrides, as one of them may name the optimizer. The default of 0.1 suits SGD only.
  if (!reader.has_read("optim.lr") && config.optim.name != OptimConfig().name) {
    config.optim.lr = default_lr(config.optim.name);
  }
  check_config(config);
  return config;
}

// Users name their own files config.yaml too, so a second sign of a run folder must lie beside it.
bool is_of_run_folder(const std::filesystem::path& path) {
  const auto lies_beside = [&](const char* name) {
    std::error_code ignored;
    return std::filesystem::exists(path.parent_path() / name, ignored);
  };
  return path.filename() == "config.yaml" && (lies_beside("run.json") || lies_beside("checkpoints"));
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::error_code ignored;
  std::ifstream file;
  // On Linux an ifstream opens a directory without an error.
  if (!std::filesystem::is_directory(path, ignored)) file.open(path, std::ios::binary);
  std::string text(kMaxYamlBytes + 1, '\0');  // no more: it may be a device without an end
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (!file.is_open() || file.bad()) {
    throw DataError("config.load", concat(path, ": the configuration cannot be read"),
                    "--config with the path of a YAML file, for instance configs/fashion-vgg.yaml");
  }
  return load(text, path, overrides, is_of_run_folder(path));
}

Config load_config_text(std::string_view text, const std::string& name,
                        const std::vector<std::string>& overrides) {
  return load(text, name, overrides, false);
}

Config load_written_config_text(std::string_view text, const std::string& name,
                                const std::vector<std::string>& overrides) {
  return load(text, name, overrides, true);
}

void check_config(Config& config) {
  check_values(config);
  check_data(config.data);
  check_optim(config);
  check_schedule(config);
  check_best(config.run);
  warn_unused(config);
  warn_unused_by_elastic(config);
}

std::string dump_config(const Config& config) {
  Config copy = config;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section() != section) {
      section = key.section();
      text += concat(section, ":\n");
    }
    // Lists of transforms and maps take lines of their own; a blank after the colon would be a trailing one.
    const std::string value = value_text(key, copy);
    text += concat("  ", key.short_name(), ":", value.starts_with('\n') ? "" : " ", value, "\n");
  }
  return text;
}

}  // namespace cohort::config
