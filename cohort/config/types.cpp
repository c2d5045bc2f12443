// A preset stays a name in the configuration; it is expanded when the transforms are asked for. So image size
// and mean count as they are then. ToTensor and Normalize are added where the list lacks them. Below are
// settings whose empty or zero value means that another key decides.
#include "cohort/config/types.h"

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/text/choice.h"
#include "cohort/config/best_metric.h"

namespace cohort::config {
namespace {

using Transforms = std::vector<TransformConfig>;

Transforms none_preset(double /*size*/, bool /*training*/) {
  return {};
}

Transforms resize_preset(double size, bool /*training*/) {
  return {{"Resize", {{"", {size, size}}}}};
}

Transforms flip_preset(double /*size*/, bool /*training*/) {
  return {{"RandomHorizontalFlip", {}}};
}

// CIFAR's usual augmentation: He et al. 2016, "Deep Residual Learning", section 4.2.
Transforms crop_flip_preset(double size, bool /*training*/) {
  return {{"RandomCrop", {{"size", {size}}, {"padding", {4}}}}, {"RandomHorizontalFlip", {}}};
}

Transforms imagenet_preset(double size, bool training) {
  if (training) {
    // Szegedy et al. 2015, "Going Deeper with Convolutions", section 6.
    return {{"RandomResizedCrop", {{"", {size}}}}, {"RandomHorizontalFlip", {}}};
  }
  // int(IMAGE_SIZE / 0.875), as the published scripts compute it.
  return {{"Resize", {{"", {static_cast<double>(static_cast<int64_t>(size / 0.875))}}}},
          {"CenterCrop", {{"", {size}}}}};
}

// What a preset stands for. resolve() gives "auto" a meaning.
constexpr base::Choice<Transforms (*)(double size, bool training)> kPresets[] = {
    {"none", none_preset},           {"resize", resize_preset},     {"flip", flip_preset},
    {"crop_flip", crop_flip_preset}, {"imagenet", imagenet_preset},
};

Transforms resolve(const DataConfig& data, const TransformList& transforms, bool training) {
  std::string preset = transforms.preset;
  // Only images of a folder differ in size and need a crop. Other data sets choose their own size.
  if (preset == "auto") preset = is_image_folder(data) ? "imagenet" : "none";
  Transforms result = transforms.list;
  if (!preset.empty()) {
    const auto make = base::choose<ConfigError>("config.load", "preset of transforms", preset, kPresets);
    result = make(static_cast<double>(data.image_size), training);
  }
  const auto has = [&](const char* name) {
    return std::any_of(result.begin(), result.end(),
                       [&](const TransformConfig& t) { return t.name == name; });
  };
  // Normalize works on tensors, so ToTensor comes before it.
  if (!has("ToTensor")) result.push_back({"ToTensor", {}});
  if (!has("Normalize") && !data.mean.empty()) {
    result.push_back({"Normalize", {{"mean", data.mean}, {"std", data.std}}});
  }
  return result;
}

}  // namespace

// Warnings are no settings: a Config that was dumped and read again is equal without them.
bool operator==(const Config& a, const Config& b) {
  return a.model == b.model && a.data == b.data && a.optim == b.optim && a.schedule == b.schedule &&
         a.train == b.train && a.distributed == b.distributed && a.comm == b.comm && a.run == b.run;
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

bool is_image_folder(const DataConfig& config) {
  return config.type == "image_folder";
}

std::int64_t image_channels(const DataConfig& config) {
  constexpr base::Choice<std::int64_t> kChannels[] = {{"rgb", 3}, {"gray", 1}};
  return base::choose<ConfigError>("config.load", "data.color", config.color, kChannels);
}

double default_lr(const std::string& optimizer) {
  return optimizer == OptimConfig().name ? OptimConfig().lr : 1e-3;
}

bool best_is_max(const RunConfig& config) {
  if (config.best_mode != "auto") return config.best_mode == "max";
  // check_config() has rejected a name that does not say; the value only stands in for a Config that nobody
  // checked.
  return more_is_better(config.best_metric).value_or(true);
}

int64_t eval_batch_size(const TrainConfig& config) {
  return config.eval_batch_size > 0 ? config.eval_batch_size : config.batch_size;
}

std::string run_name(const RunConfig& run, const ModelConfig& model) {
  return run.name.empty() ? model.name : run.name;
}

}  // namespace cohort::config
