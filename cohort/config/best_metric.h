#pragma once

#include <optional>
#include <string>

/// What the name of a metric says about it. No LibTorch.
namespace cohort::config {

/// Returns whether more of `metric` is better: false for val_loss or rmse, true for val_accuracy or f1.
/// Nothing where the name does not say.
std::optional<bool> more_is_better(const std::string& metric);

}  // namespace cohort::config
