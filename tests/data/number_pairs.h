#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/data/tensor_dataset.h"

namespace cohort::data {

/// Sample i is the numbers 2 i and 2 i + 1, with the target i.
inline std::shared_ptr<TensorDataset> number_pairs(std::int64_t size) {
  return std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{at::arange(size * 2, at::kFloat).reshape({size, 2}), at::arange(size)});
}

}  // namespace cohort::data
