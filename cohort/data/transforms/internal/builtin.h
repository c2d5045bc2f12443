#pragma once

#include <string>
#include <vector>

#include "cohort/data/transforms/transform.h"

/// The transforms that come with Cohort; see docs/guide/transforms.md.
namespace cohort::data {

struct BuiltinTransform {
  std::string name;
  std::string first_argument;
  TransformFactory make;
};

/// Returns Resize, CenterCrop, RandomCrop, RandomResizedCrop, RandomHorizontalFlip and Grayscale.
std::vector<BuiltinTransform> builtin_transforms();

}  // namespace cohort::data
