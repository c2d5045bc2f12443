#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/train/internal/factories.h"

/// Training and validation data of a run. Internal to this module.
namespace cohort::train {

/// What one rank reads of a run's data.
class RunData {
 public:
  RunData(config::DataConfig config, DatasetSetup datasets, LoaderSetup loaders);

  /// Opens the training data, and begins to read it ahead where `reads_ahead`: it is known which shares are
  /// computed here. Throws: as make_dataset(); UsageError where it has no batch.
  void open_training(bool reads_ahead = true);
  /// Opens the validation data. `trained`: the classes of a model that is evaluated, which those of the data
  /// are taken for by name. Throws: as open_training(); DataError where open training data has other classes.
  void open_evaluation(const std::vector<std::string>& trained = {});

  /// Returns what a model for this data is made with. Training or validation data is open.
  ModelSetup model_setup() const;
  /// Logs how many samples could not be read.
  void warn_of_skipped() const;

  data::Loader& training() const { return *training_; }           ///< open
  data::Loader* evaluation() const { return evaluation_.get(); }  ///< null: not open

 private:
  void check_same_classes(const data::Dataset& evaluation) const;

  config::DataConfig config_;
  DatasetSetup datasets_;
  LoaderSetup loaders_;
  std::size_t num_trained_ = 0;  // classes; 0: those of the data
  std::unique_ptr<data::Loader> training_, evaluation_;
};

}  // namespace cohort::train
