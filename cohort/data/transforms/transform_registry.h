#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cohort/data/transforms/transform.h"

/// Transforms by name.
namespace cohort::data {

/// Makes `name` known to `make_transform` and pipelines. `first_argument` is what the key "" stands for.
/// Throws: UsageError when the name is taken.
void register_transform(const std::string& name, const std::string& first_argument, TransformFactory factory);

/// Returns the transform that `spec` describes.
/// Throws: ConfigError for an unknown name or argument, naming the nearest one, and for values out of range.
std::unique_ptr<Transform> make_transform(const TransformSpec& spec);

/// Returns the names that a pipeline knows, sorted, with ToTensor and Normalize.
std::vector<std::string> transform_names();

}  // namespace cohort::data
