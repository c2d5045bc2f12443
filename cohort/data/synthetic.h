#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/data/dataset.h"

namespace cohort::data {

/// What images SyntheticDataset draws.
struct SyntheticOptions {
  std::int64_t size = 1024;
  /// Of one image: [C, H, W].
  std::vector<std::int64_t> shape = {3, 64, 64};
  std::int64_t num_classes = 10;
  std::uint64_t seed = 0;
  /// Batches are laid out NHWC.
  bool channels_last = false;
};

/// Images that need no file: noise over a coarse pattern per class, so that a model can learn them. A sample
/// is a function of (seed, index) and is the same in every epoch. Fields: image (float32, [C, H, W], about
/// zero mean and unit deviation) and label (int64, []).
class SyntheticDataset : public Dataset {
 public:
  /// Throws: UsageError naming the option and its value.
  explicit SyntheticDataset(SyntheticOptions options);

  std::int64_t size() const override { return options_.size; }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const override;
  std::string describe(std::int64_t index) const override;
  std::vector<std::string> classes() const override;
  std::string fingerprint() const override;

 private:
  SyntheticOptions options_;
  std::vector<float> patterns_;  // [class][C][kGrid][kGrid]
};

}  // namespace cohort::data
