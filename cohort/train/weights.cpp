#include "cohort/train/weights.h"

#include <array>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/run_checkpoints.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

constexpr const char* kHint =
    "a run folder (runs/NAME), a checkpoint (runs/NAME/checkpoints/last) or a .safetensors file";
constexpr std::array kOfRun = {"best", "last"};  // what a run folder stands for; the first that is there

/// True for a folder that is no checkpoint, so one of a run.
bool is_run_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error) && !fs::exists(path / checkpoint::kManifestFile, error);
}

}  // namespace

fs::path find_weights(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw DataError("train.weights", base::concat("there is no ", path.string()), kHint);
  }
  // A file may be a link, where the file system has none of its own.
  if (!fs::is_directory(path, error)) return checkpoint::follow_link(path).value_or(path);
  if (!is_run_folder(path)) return path;
  const checkpoint::RunCheckpoints checkpoints(path / "checkpoints");
  // A run that was not evaluated has no best.
  for (const char* which : kOfRun) {
    if (const auto found = checkpoints.find(which)) return *found;
  }
  throw DataError("train.weights", base::concat("the folder ", path.string(), " holds no checkpoint"), kHint);
}

checkpoint::TensorMap read_weights(const fs::path& path) {
  if (is_run_folder(path)) {
    // The run may save in this moment, and remove what is the best.
    const checkpoint::RunCheckpoints checkpoints(path / "checkpoints");
    for (const char* which : kOfRun) {
      if (auto found = checkpoints.find_and_load(which)) return std::move(found->content.model);
    }
  }
  const fs::path weights = find_weights(path);
  std::error_code error;
  return fs::is_directory(weights, error) ? checkpoint::RunCheckpoints::load(weights).model
                                          : checkpoint::load_safetensors(weights);
}

}  // namespace cohort::train
