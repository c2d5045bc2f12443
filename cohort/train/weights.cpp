#include "cohort/train/weights.h"

#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/core/error.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

constexpr const char* kHint =
    "a run folder (runs/NAME), a checkpoint (runs/NAME/checkpoints/last) or a .safetensors file";

}  // namespace

fs::path find_weights(const fs::path& path) {
  if (!fs::exists(path)) {
    throw DataError("train.weights", core::concat("there is no ", path.string()), kHint);
  }
  // A file may be a link, where the file system has none of its own.
  if (!fs::is_directory(path)) return checkpoint::follow_link(path).value_or(path);
  if (fs::exists(path / "state.json")) return path;
  const checkpoint::RunCheckpoints checkpoints(path / "checkpoints");
  for (const char* which : {"best", "last"}) {
    if (const auto found = checkpoints.find(which)) return *found;
  }
  throw DataError("train.weights", core::concat("the folder ", path.string(), " holds no checkpoint"), kHint);
}

checkpoint::TensorMap read_weights(const fs::path& path) {
  const fs::path weights = find_weights(path);
  std::error_code error;
  return fs::is_directory(weights, error) ? checkpoint::RunCheckpoints::load(weights).model
                                          : checkpoint::load_safetensors(weights);
}

}  // namespace cohort::train
