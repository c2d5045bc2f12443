// Training data is read ahead from the moment that it is open, so while the model is made. Training and
// validation must have the same classes: a class more in either would shift the labels after it.
#include "cohort/train/internal/run_data.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/train/classes.h"
#include "cohort/train/internal/fit/compatibility.h"

namespace cohort::train {
namespace {

void warn_of_skipped(const char* kind, const data::Loader* loader) {
  const std::int64_t skipped = loader != nullptr ? loader->counters().samples_skipped : 0;
  if (skipped == 0) return;
  base::log_warning(base::concat(skipped, " times a ", kind, " sample could not be read and was left out"));
}

}  // namespace

RunData::RunData(config::DataConfig config, DatasetSetup datasets, LoaderSetup loaders)
    : config_(std::move(config)), datasets_(datasets), loaders_(loaders) {}

void RunData::open_training(bool reads_ahead) {
  training_ = make_loader(config_, Split::kTrain, make_dataset(config_, Split::kTrain, datasets_), loaders_);
  check_has_batch(*training_, "training");
  if (reads_ahead) training_->start();
}

void RunData::open_evaluation(const std::vector<std::string>& trained) {
  const auto dataset = with_trained_labels(make_dataset(config_, Split::kVal, datasets_), trained);
  check_same_classes(*dataset);
  evaluation_ = make_loader(config_, Split::kVal, dataset, loaders_);
  check_has_batch(*evaluation_, "evaluation");
  num_trained_ = trained.size();
}

void RunData::check_same_classes(const data::Dataset& evaluation) const {
  if (!training_) return;
  const auto train = training_->dataset().classes(), val = evaluation.classes();
  if (train == val || train.empty() || val.empty()) return;
  base::TextList in_one_only(" ");
  for (const std::string& names : {missing_from(val, train), missing_from(train, val)}) {
    if (!names.empty()) in_one_only.add(names);
  }
  throw DataError("train.run",
                  base::concat("the training and the validation data have different classes; in one only: ",
                               in_one_only.text()),
                  class_hint(config_.type));
}

ModelSetup RunData::model_setup() const {
  const data::Dataset& dataset = (training_ ? training_ : evaluation_)->dataset();
  const std::size_t num_classes = num_trained_ > 0 ? num_trained_ : dataset.classes().size();
  return {.input = input_field(config_, datasets_.channels_last, dataset),
          .num_classes = static_cast<std::int64_t>(num_classes),
          .device = loaders_.device,
          .seed = loaders_.seed,
          .channels_last = datasets_.channels_last};
}

void RunData::warn_of_skipped() const {
  train::warn_of_skipped("training", training_.get());
  train::warn_of_skipped("validation", evaluation_.get());
}

}  // namespace cohort::train
