#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cohort/data/dataset.h"

namespace cohort::data {

/// A dataset over tensors in memory that have the same first dimension: sample i is row i of each.
/// Ownership: shares the tensors' memory if they are contiguous on the CPU, else copies once. Do not write to
/// them while a loader reads.
class TensorDataset : public Dataset {
 public:
  /// `names` defaults to input, target, field2, ...
  /// Throws: UsageError if there is no tensor, one is a scalar, or the first dimensions differ.
  explicit TensorDataset(std::vector<at::Tensor> tensors, std::vector<std::string> names = {});

  std::int64_t size() const override { return size_; }
  std::vector<Field> fields() const override { return fields_; }
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const override;
  std::string describe(std::int64_t index) const override;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<Field> fields_;
  std::vector<const std::byte*> bytes_;
  std::vector<std::size_t> row_bytes_;
  std::int64_t size_ = 0;
};

}  // namespace cohort::data
