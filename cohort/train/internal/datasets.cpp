// A table has the data sets that the keys of section data describe: how each is made, and what helps where
// its classes differ. Any other name is a library's: it gets the split, the path and data.options as text.
#include "cohort/train/internal/datasets.h"

#include <filesystem>
#include <map>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/data/idx_dataset.h"
#include "cohort/data/image_folder.h"
#include "cohort/data/synthetic.h"
#include "cohort/memory/process_memory.h"
#include "cohort/train/internal/config_choices.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

std::string path_of(const config::DataConfig& config, Split split) {
  return split == Split::kTrain ? config::train_path(config) : config::val_path(config);
}

std::vector<data::TransformSpec> transforms_of(const config::DataConfig& config, Split split) {
  std::vector<data::TransformSpec> specs;
  for (const config::TransformConfig& transform :
       split == Split::kTrain ? train_transforms(config) : val_transforms(config)) {
    specs.push_back({transform.name, transform.args});
  }
  return specs;
}

/// Both pairs of IDX files lie in one folder, unless a folder of their own is named.
const std::string& idx_folder(const config::DataConfig& config, Split split) {
  const std::string& own = split == Split::kTrain ? config.train : config.val;
  return own.empty() ? config.path : own;
}

/// What to try where the data of `split` is not there.
const char* data_hint(Split split) {
  return split == Split::kTrain ? "data.path=FOLDER, or data.train=FOLDER"
                                : "data.val=FOLDER, or train.eval_every=0, which trains without validation";
}

/// Throws: DataError naming the keys that say where the data is, when `folder` is not there.
void check_folder(const std::string& folder, Split split) {
  std::error_code ignored;
  if (fs::exists(folder, ignored)) return;
  throw DataError("train.make_dataset",
                  base::concat("there is no ", split == Split::kTrain ? "training" : "validation",
                               " data: the folder ", folder, " does not exist"),
                  data_hint(split));
}

data::IdxPair find_idx_files(const std::string& folder, Split split) {
  check_folder(folder, split);
  try {
    return data::find_idx_pair(folder, split == Split::kTrain ? "train" : "t10k");
  } catch (const DataError& error) {
    throw DataError("train.make_dataset", error.what(), data_hint(split));
  }
}

/// data.options are for registered data sets; Cohort's own have keys.
void check_data_options(const config::DataConfig& data) {
  if (data.options.empty()) return;
  if (data::is_own_dataset(data.type)) {
    throw ConfigError("train.make_dataset",
                      base::concat("data.options.", data.options.begin()->first, " is set, but data.type is ",
                                   data.type, ", which has no options"),
                      "the keys of data, or data.type with the name of a registered data set");
  }
  for (const char* taken : {"split", "path"}) {
    if (data.options.contains(taken)) {
      throw ConfigError("train.make_dataset",
                        base::concat("data.options.", taken, " is set, but that is given by the run"),
                        "data.path, data.train and data.val, or another name");
    }
  }
}

std::shared_ptr<const data::Dataset> make_synthetic(const config::DataConfig& config, Split split,
                                                    const DatasetSetup& setup) {
  return std::make_shared<data::SyntheticDataset>(
      data::SyntheticOptions{.size = split == Split::kTrain ? config.synthetic_train : config.synthetic_val,
                             .shape = {config::image_channels(config), config.image_size, config.image_size},
                             .num_classes = setup.num_classes > 0 ? setup.num_classes : 10,
                             .seed = static_cast<std::uint64_t>(setup.seed) * 2 + (split == Split::kVal),
                             .channels_last = setup.channels_last});
}

std::shared_ptr<const data::Dataset> make_image_folder(const config::DataConfig& config, Split split,
                                                       const DatasetSetup& setup) {
  const std::string path = path_of(config, split);
  check_folder(path, split);
  data::ImageFolderOptions options;
  options.transforms = transforms_of(config, split);
  options.color = color_of(config);
  options.channels_last = setup.channels_last;
  options.allow_empty = keeps_empty_classes(config);
  options.on_other_files = on_other_files_of(config);
  if (caches_files(config)) {
    options.cache_bytes = cache_bytes(split, memory::system_memory().available_bytes, setup.ranks_on_host);
  }
  return std::make_shared<data::ImageFolder>(path, options);
}

std::shared_ptr<const data::Dataset> make_idx(const config::DataConfig& config, Split split,
                                              const DatasetSetup& setup) {
  const data::IdxPair files = find_idx_files(idx_folder(config, split), split);
  return std::make_shared<data::IdxDataset>(
      files.images, files.labels,
      data::IdxDatasetOptions{.transforms = transforms_of(config, split),
                              .channels_last = setup.channels_last});
}

/// A data set that the keys of section data describe.
struct OwnDataset {
  std::shared_ptr<const data::Dataset> (*make)(const config::DataConfig&, Split, const DatasetSetup&);
  const char* class_hint;
};

constexpr const char* kAnyClassHint = "data sets that return the same classes()";

// A test compares the names with those of data::is_own_dataset(). A library registers any other.
const std::map<std::string, OwnDataset>& own_datasets() {
  static const std::map<std::string, OwnDataset> table = {
      {"idx",
       {make_idx,
        "IDX files of one data set (classes are 0 to the largest label); where no validation sample has the "
        "last labels, train.eval_every=0, and cohort eval after it, which takes labels as they are"}},
      {"image_folder", {make_image_folder, "the same class folders in both"}},
      {"synthetic", {make_synthetic, kAnyClassHint}}};
  return table;
}

}  // namespace

// The caches of all ranks of a host take at most half of what is free. Three quarters of it are for training
// data, which is larger as a rule.
std::int64_t cache_bytes(Split split, std::int64_t available_bytes, int ranks_on_host) {
  const std::int64_t quarters = split == Split::kTrain ? 3 : 1;
  return available_bytes / 2 * quarters / 4 / ranks_on_host;
}

DatasetSetup dataset_setup(const config::ModelConfig& model, const config::TrainConfig& train,
                           std::int64_t seed, int ranks_on_host) {
  return {.num_classes = model.num_classes,
          .seed = seed,
          .channels_last = is_channels_last(train),
          .ranks_on_host = ranks_on_host};
}

std::shared_ptr<const data::Dataset> make_dataset(const config::DataConfig& config, Split split,
                                                  const DatasetSetup& setup) {
  data::check_dataset_name(config.type);
  check_data_options(config);
  const auto own = own_datasets().find(config.type);
  if (own != own_datasets().end()) return own->second.make(config, split, setup);
  data::DatasetArgs args = config.options;
  args["split"] = split == Split::kTrain ? "train" : "val";
  args["path"] = path_of(config, split);
  return data::make_dataset(config.type, args);
}

std::vector<std::string> own_dataset_names() {
  std::vector<std::string> names;
  for (const auto& own : own_datasets()) names.push_back(own.first);
  return names;
}

const char* class_hint(const std::string& type) {
  const auto own = own_datasets().find(type);
  return own != own_datasets().end() ? own->second.class_hint : kAnyClassHint;
}

}  // namespace cohort::train
