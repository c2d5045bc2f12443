#pragma once

#include <string>

#include "cohort/config/config.h"

/// What becomes of settings that differ when a run resumes: `ConfigKey::on_resume`, applied; and those that
/// differ when its model is used. No LibTorch.
namespace cohort::config {

/// Returns the keys that differ and take effect, with both values ("optim.lr 0.05 -> 0.01, ..."); empty:
/// none. `before` made the checkpoint `from`, `now` is the one that resumes from it. `same_step`: a step over
/// all ranks has as many samples as before, so that the keys that make a step may differ. Throws: ConfigError
/// naming all keys that differ and are rejected, with both values.
std::string check_resume(Config before, Config now, bool same_step, const std::string& from);

/// Returns the keys that differ between `trained`, which made a checkpoint, and `now`, and that say what the
/// model is and what it gets, with both values ("data.mean [0.5] -> [0.4]"); empty: none.
std::string other_inputs(Config trained, Config now);

}  // namespace cohort::config
