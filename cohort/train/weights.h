#pragma once

#include <filesystem>

/// What a path to a trained model may name.
namespace cohort::train {

/// Returns the checkpoint folder or safetensors file that `path` stands for: of a run folder its best
/// checkpoint, or the last one where none was the best; anything else is itself. Throws: DataError where
/// nothing is there, and for a folder that holds no checkpoint.
std::filesystem::path find_weights(const std::filesystem::path& path);

}  // namespace cohort::train
