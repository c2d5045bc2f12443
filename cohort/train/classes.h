#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/checkpoint/safetensors.h"
#include "cohort/data/dataset.h"

/// What a checkpoint says of its training: the configuration, and the classes by name, which need not be
/// those of a data set that the model is given later.
namespace cohort::train {

/// Returns the names of the classes that the model of `checkpoint` (a folder, or a safetensors file in one)
/// was trained on, by label, which are none where its data had no names; nothing where the checkpoint does
/// not say: one of an older version, or a file alone. Throws: DataError for a checkpoint that is broken.
std::optional<std::vector<std::string>> trained_classes(const std::filesystem::path& checkpoint);

/// Returns the configuration that made `checkpoint`, as YAML; empty where the checkpoint does not say, as
/// above. Throws: DataError.
std::string trained_config(const std::filesystem::path& checkpoint);

/// What a model is used with.
struct TrainedWeights {
  std::string checkpoint;                           ///< the name of its folder, or of the file
  std::optional<std::vector<std::string>> classes;  ///< as trained_classes()
  checkpoint::TensorMap tensors;                    ///< the model's, by name
};

/// Reads what `checkpoint`, a path as find_weights() takes it, holds of a trained model. It stays valid where
/// a run that saves removes the checkpoint: read it before anything that takes long. Throws: as
/// read_weights() and trained_classes(), also for a checkpoint that is removed meanwhile.
TrainedWeights read_trained_weights(const std::filesystem::path& checkpoint);

/// Returns `dataset` with the labels of `trained`: its class cat has the label that cat had in training. It
/// may have some of the classes only. Without names on either side it is returned as it is. Throws: DataError
/// naming classes that are not among `trained`, or where samples have no label.
std::shared_ptr<const data::Dataset> with_trained_labels(std::shared_ptr<const data::Dataset> dataset,
                                                         const std::vector<std::string>& trained);

}  // namespace cohort::train
