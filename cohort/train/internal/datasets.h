#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/config/config.h"
#include "cohort/data/dataset.h"

/// Data sets as the section data describes them. Internal to this module.
namespace cohort::train {

/// Which of the two data sets.
enum class Split { kTrain, kVal };

/// What a data set is made with, besides the section data.
struct DatasetSetup {
  std::int64_t num_classes;   ///< of synthetic images; 0: 10
  std::int64_t seed;          ///< of synthetic images
  bool channels_last = true;  ///< how images lie in a batch
  /// Processes of the run on this machine, each with a data set of its own: they share the memory that
  /// data.cache may take, half of what is available, three quarters of it for training data.
  int ranks_on_host = 1;
};
DatasetSetup dataset_setup(const config::ModelConfig& model, const config::TrainConfig& train,
                           std::int64_t seed, int ranks_on_host = 1);

/// Throws: ConfigError, DataError.
std::shared_ptr<const data::Dataset> make_dataset(const config::DataConfig& config, Split split,
                                                  const DatasetSetup& setup);
/// The bytes that one of these data sets may take.
std::int64_t cache_bytes(Split split, std::int64_t available_bytes, int ranks_on_host);

/// Returns the names of the data sets that the keys of section data describe, sorted. data::is_own_dataset()
/// is true of these.
std::vector<std::string> own_dataset_names();

/// Returns what to try where training and validation data of `type` (data.type) have different classes.
const char* class_hint(const std::string& type);

}  // namespace cohort::train
