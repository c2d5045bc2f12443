#include "cohort/train/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cohort/core/error.h"
#include "cohort/train/best_metric.h"
#include "cohort/train/config_reader.h"
#include "cohort/train/flat_keys.h"
#include "cohort/train/yaml_text.h"

namespace cohort::train {
namespace {

using core::concat;

[[noreturn]] void fail(const std::string& what, const std::string& hint = "") {
  throw ConfigError("train.config", what, hint);
}

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
  const std::size_t channels = data.color == "grey" ? 1 : 3;
  const bool is_folder = data.kind == "image_folder";
  if (is_folder && !data.mean.empty() && data.mean.size() != channels) {
    fail(concat("data.mean has ", data.mean.size(), " numbers: expected ", channels,
                ", one per channel of data.color ", data.color));
  }
}

void check_optim(const OptimConfig& optim) {
  if (optim.betas.size() != 2) fail(concat("optim.betas has ", optim.betas.size(), " numbers: expected 2"));
  if (optim.name == "sgd" && optim.nesterov && optim.momentum == 0) {
    fail("optim.nesterov is true and optim.momentum is 0: expected momentum above 0", "optim.momentum=0.9");
  }
}

void check_schedule(const ScheduleConfig& schedule) {
  const int warmups =
      (schedule.warmup_epochs > 0) + (schedule.warmup_steps > 0) + (schedule.warmup_fraction > 0);
  if (warmups > 1) {
    fail("more than one of schedule.warmup_epochs, warmup_steps and warmup_fraction is set",
         "one of them only");
  }
  if (warmups > 0 && schedule.name == "one_cycle") {
    fail("schedule.one_cycle has a warm-up of its own: expected no schedule.warmup_*", "schedule.pct_start");
  }
  const auto& milestones = schedule.milestones;
  if (std::adjacent_find(milestones.begin(), milestones.end(), std::greater_equal<>()) != milestones.end()) {
    fail("schedule.milestones: expected numbers that rise");
  }
}

void check_best(const RunConfig& run) {
  if (run.best_mode != "auto" || more_is_better(run.best_metric)) return;
  fail(concat("run.best_metric is ", run.best_metric,
              ", and the name does not say whether more of it is better"),
       "run.best_mode=max or run.best_mode=min");
}

void check_script(const Config& config) {
  const std::string& strategy = config.distributed.strategy;
  const auto& on_placements = find_key("distributed.placements")->used_values;
  if (!config.train.script || std::ranges::find(on_placements, strategy) == on_placements.end()) return;
  fail(concat("train.script is true and distributed.strategy is ", strategy,
              ", whose operators run on threads of placements, where they cannot be recorded"),
       "train.script=false, or distributed.strategy ddp or average");
}

/// Says which settings differ from their default but have no effect here.
void warn_unused(Config& config) {
  Config defaults;
  for (const ConfigKey& key : config_keys()) {
    if (key.used_with == nullptr || same_value(key, config, defaults)) continue;
    const ConfigKey& other = *find_key(key.used_with);
    const std::string value = *std::get<std::string*>(other.target(config));
    if (std::find(key.used_values.begin(), key.used_values.end(), value) != key.used_values.end()) continue;
    const std::string warning = concat(key.name, " has no effect with ", key.used_with, " ", value);
    if (std::ranges::find(config.warnings, warning) == config.warnings.end()) {
      config.warnings.push_back(warning);
    }
  }
}

/// What a preset stands for; "auto" was resolved by the caller.
std::vector<TransformConfig> preset_transforms(const std::string& preset, int64_t image_size, bool training) {
  const double size = static_cast<double>(image_size);
  if (preset == "resize") return {{"Resize", {{"", {size, size}}}}};
  if (preset == "flip") return {{"RandomHorizontalFlip", {}}};
  if (preset == "crop_flip") {
    return {{"RandomCrop", {{"size", {size}}, {"padding", {4}}}}, {"RandomHorizontalFlip", {}}};
  }
  if (preset == "imagenet" && training) {
    return {{"RandomResizedCrop", {{"", {size}}}}, {"RandomHorizontalFlip", {}}};
  }
  if (preset == "imagenet") {
    // int(IMAGE_SIZE / 0.875), as the published scripts compute it.
    return {{"Resize", {{"", {static_cast<double>(static_cast<int64_t>(size / 0.875))}}}},
            {"CenterCrop", {{"", {size}}}}};
  }
  return {};
}

std::vector<TransformConfig> resolve(const DataConfig& data, const TransformList& transforms, bool training) {
  std::string preset = transforms.preset;
  if (preset == "auto") preset = data.kind == "image_folder" ? "imagenet" : "none";
  std::vector<TransformConfig> result =
      preset.empty() ? transforms.list : preset_transforms(preset, data.image_size, training);
  const auto has = [&](const char* name) {
    return std::any_of(result.begin(), result.end(),
                       [&](const TransformConfig& t) { return t.name == name; });
  };
  if (!has("ToTensor")) result.push_back({"ToTensor", {}});
  if (!has("Normalize") && !data.mean.empty()) {
    result.push_back({"Normalize", {{"mean", data.mean}, {"std", data.std}}});
  }
  return result;
}

}  // namespace

bool operator==(const Config& a, const Config& b) {
  return a.model == b.model && a.data == b.data && a.optim == b.optim && a.schedule == b.schedule &&
         a.train == b.train && a.distributed == b.distributed && a.comm == b.comm && a.run == b.run;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::error_code ignored;
  std::ifstream file;
  if (!std::filesystem::is_directory(path, ignored)) file.open(path, std::ios::binary);
  std::string text(kMaxYamlBytes + 1, '\0');  // no more: it may be a device without an end
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (!file.is_open() || file.bad()) {
    throw DataError("train.config", concat(path, ": the configuration cannot be read"),
                    "--config with the path of a YAML file, for instance configs/fashion-vgg.yaml");
  }
  return load_config_text(text, path, overrides);
}

Config load_config_text(std::string_view text, const std::string& name,
                        const std::vector<std::string>& overrides) {
  Config config;
  const YamlSource source{name, false};
  const YAML::Node document = parse_yaml(repair_legacy_text(text, name, config.warnings), source);
  ConfigReader reader(config);
  reader.read_document(document, source);
  for (const std::string& override_text : overrides) reader.read_override(override_text);
  if (!reader.has_read("optim.lr") && config.optim.name != OptimConfig().name) {
    config.optim.lr = default_lr(config.optim.name);
  }
  check_config(config);
  return config;
}

void check_config(Config& config) {
  check_values(config);
  check_data(config.data);
  check_optim(config.optim);
  check_schedule(config.schedule);
  check_script(config);
  check_best(config.run);
  warn_unused(config);
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
    const std::string value = value_text(key, copy);
    text += concat("  ", key.short_name(), ":", value.starts_with('\n') ? "" : " ", value, "\n");
  }
  return text;
}

std::vector<TransformConfig> train_transforms(const DataConfig& config) {
  return resolve(config, config.train_transforms, true);
}

std::vector<TransformConfig> val_transforms(const DataConfig& config) {
  return resolve(config, config.val_transforms, false);
}

std::string train_path(const DataConfig& config) {
  return config.train.empty() ? config.path + "/train" : config.train;
}

std::string val_path(const DataConfig& config) {
  return config.val.empty() ? config.path + "/val" : config.val;
}

double default_lr(const std::string& optimizer) {
  return optimizer == OptimConfig().name ? OptimConfig().lr : 1e-3;
}

bool best_is_max(const RunConfig& config) {
  if (config.best_mode != "auto") return config.best_mode == "max";
  return more_is_better(config.best_metric).value_or(true);
}

int64_t eval_batch_size(const TrainConfig& config) {
  return config.eval_batch_size > 0 ? config.eval_batch_size : config.batch_size;
}

std::int64_t lr_base_size(const Config& config) {
  return config.optim.lr_base_size > 0 ? config.optim.lr_base_size
                                       : config.train.batch_size * config.train.accumulate;
}

}  // namespace cohort::train
