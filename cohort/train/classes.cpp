// Labels are matched by the names of classes: a wrapper around the data set replaces each label by that of
// training. A class that the model does not know is an error before the first sample is read. Of a checkpoint
// the classes are read before the tensors, so a removal in between is noticed.
#include "cohort/train/classes.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/weights.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

/// A data set whose labels are replaced, and nothing else.
class Relabelled : public data::Dataset {
 public:
  Relabelled(std::shared_ptr<const data::Dataset> dataset, std::vector<std::int64_t> labels,
             std::vector<std::string> classes)
      : dataset_(std::move(dataset)), labels_(std::move(labels)), classes_(std::move(classes)) {
    const std::vector<data::Field> fields = dataset_->fields();
    if (fields.size() < 2 || fields[1].dtype != at::kLong || fields[1].numel() != 1) {
      throw DataError(
          "train.classes",
          "the data set has names of classes, but its second field is not one whole number, the label");
    }
  }

  std::int64_t size() const override { return dataset_->size(); }
  std::vector<data::Field> fields() const override { return dataset_->fields(); }
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const override {
    dataset_->read(index, random, out);
    std::int64_t label = 0;
    std::memcpy(&label, out[1], sizeof label);
    if (label < 0 || label >= static_cast<std::int64_t>(labels_.size())) {
      throw DataError("train.classes",
                      base::concat(describe(index), ": label ", label, " of ", labels_.size(), " classes"));
    }
    label = labels_[static_cast<std::size_t>(label)];
    std::memcpy(out[1], &label, sizeof label);
  }
  std::string describe(std::int64_t index) const override { return dataset_->describe(index); }
  std::vector<std::string> classes() const override { return classes_; }
  std::string fingerprint() const override { return dataset_->fingerprint(); }

 private:
  std::shared_ptr<const data::Dataset> dataset_;
  std::vector<std::int64_t> labels_;  // in training, by label in `dataset_`
  std::vector<std::string> classes_;
};

/// What the state.json of a checkpoint says, or the one beside a file; nothing where it is not there. Other
/// programs write files of that name too: beside a file alone they are none of ours.
std::optional<nlohmann::json> state_of(const fs::path& checkpoint) {
  std::error_code error;
  if (fs::is_directory(checkpoint, error)) {
    return checkpoint::read_manifest(find_weights(checkpoint)).state;
  }
  const fs::path folder = fs::absolute(checkpoint).parent_path(), file = folder / checkpoint::kManifestFile;
  if (!fs::exists(file, error) || !checkpoint::is_manifest(file)) return std::nullopt;
  return checkpoint::read_manifest(folder).state;
}

}  // namespace

std::optional<std::vector<std::string>> trained_classes(const fs::path& checkpoint) {
  const std::optional<nlohmann::json> state = state_of(checkpoint);
  if (!state) return std::nullopt;
  const DataOfRun data = data_of(*state);
  if (data.samples == 0 && data.classes.empty()) return std::nullopt;
  return data.classes;
}

std::string trained_config(const fs::path& checkpoint) {
  const std::optional<nlohmann::json> state = state_of(checkpoint);
  return state && state->contains("run") ? run_of(*state).description : "";
}

TrainedWeights read_trained_weights(const fs::path& checkpoint) {
  fs::path found = find_weights(checkpoint);
  std::error_code error;
  // A link to a checkpoint may move between the reads.
  if (fs::is_directory(found, error)) found = fs::weakly_canonical(found, error);
  if (error) {
    throw DataError("train.weights",
                    base::concat("cannot read ", checkpoint.string(), ": ", error.message()));
  }
  // The classes first: where the checkpoint is removed between the two, its tensors are missed, which is an
  // error; a checkpoint without classes is none.
  TrainedWeights result{
      .checkpoint = found.filename().string(), .classes = trained_classes(found), .tensors = {}};
  result.tensors = read_weights(found);
  return result;
}

std::shared_ptr<const data::Dataset> with_trained_labels(std::shared_ptr<const data::Dataset> dataset,
                                                         const std::vector<std::string>& trained) {
  const std::vector<std::string> classes = dataset->classes();
  if (trained.empty() || classes.empty() || classes == trained) return dataset;
  std::vector<std::int64_t> labels;
  std::vector<std::string> unknown;
  for (const std::string& name : classes) {
    const auto found = std::ranges::find(trained, name);
    if (found == trained.end()) unknown.push_back(name);
    labels.push_back(found - trained.begin());
  }
  if (!unknown.empty()) {
    throw DataError("train.classes",
                    base::concat("the model was not trained on these classes of the data: ",
                                 base::join(unknown, " "), "; it was trained on: ", base::join(trained, " ")),
                    "data whose classes have the names that they had in training");
  }
  return std::make_shared<Relabelled>(std::move(dataset), std::move(labels), trained);
}

}  // namespace cohort::train
