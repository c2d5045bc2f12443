#pragma once

#include <string>
#include <vector>

#include "cohort/data/dataset.h"
#include "cohort/data/idx.h"
#include "cohort/data/transforms/transform_pipeline.h"

namespace cohort::data {

/// How IDX files become samples.
struct IdxDatasetOptions {
  /// What becomes of an image; only ToTensor if empty.
  std::vector<TransformSpec> transforms = {};
  /// Batches are laid out NHWC.
  bool channels_last = false;
};

/// The MNIST family: a file of images and a file of labels, plain or compressed, held in memory.
/// Fields: image (float32, [C, H, W]) and label (int64, []).
///
///     const auto pair = find_idx_pair("/usr/share/datasets/fashion-mnist", "train");
///     IdxDataset train(pair.images, pair.labels);
class IdxDataset : public Dataset {
 public:
  /// Throws: DataError for files that cannot be read or do not belong together; ConfigError for transforms
  /// that cannot be used.
  IdxDataset(const std::string& images, const std::string& labels, const IdxDatasetOptions& options = {});

  std::int64_t size() const override { return images_.shape[0]; }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const override;
  /// The file of images and the index in it.
  std::string describe(std::int64_t index) const override;
  /// Digits up to the largest label.
  std::vector<std::string> classes() const override;
  /// Of all pixels and labels.
  std::string fingerprint() const override;

 private:
  std::string name_;
  IdxArray images_;
  IdxArray labels_;
  std::int64_t channels_;
  TransformPipeline pipeline_;
  bool channels_last_;
};

}  // namespace cohort::data
