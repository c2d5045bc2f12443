#pragma once

#include <filesystem>

#include "cohort/checkpoint/safetensors.h"

/// What a path to a trained model may name.
namespace cohort::train {

/// Returns the checkpoint folder or safetensors file that `path` stands for: of a run folder its best
/// checkpoint, or the last one where none was the best; anything else is itself. Throws: DataError where
/// nothing is there, and for a folder that holds no checkpoint.
std::filesystem::path find_weights(const std::filesystem::path& path);

/// Reads the parameters and buffers of what `path` stands for. They stay valid where a run that saves removes
/// the checkpoint: read them before anything that takes long. Throws: DataError as find_weights(), and for
/// what is damaged.
checkpoint::TensorMap read_weights(const std::filesystem::path& path);

}  // namespace cohort::train
