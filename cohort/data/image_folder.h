#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/data/codecs/codec.h"
#include "cohort/data/dataset.h"
#include "cohort/data/encoded_cache.h"
#include "cohort/data/folder_scan.h"
#include "cohort/data/image.h"
#include "cohort/data/transforms/transform_pipeline.h"

namespace cohort::data {

/// How an image folder becomes samples.
struct ImageFolderOptions {
  /// What becomes of an image; only ToTensor if empty.
  std::vector<TransformSpec> transforms = {};
  /// What images are decoded to, whatever the file holds: it says how many channels a sample has.
  ColorMode color = ColorMode::kRgb;
  /// Batches are laid out NHWC.
  bool channels_last = false;
  /// A class without images is an error unless this is set.
  bool allow_empty = false;
  /// What happens to files that are no images.
  OnOtherFiles on_other_files = OnOtherFiles::kWarn;
  /// Keep up to this many bytes of files in memory: for storage that is slow and not cached by the system.
  std::int64_t cache_bytes = 0;
  /// Limits of the decoder, and whether it takes damaged files.
  DecodeOptions decode = {};
};

/// Images (JPEG, PNG) in a folder per class, nested at will, in the order of torchvision's `ImageFolder`.
/// Fields: image (float32, [C, H, W]) and label (int64, []).
///
///     ImageFolder train("data/train", {.transforms = {resize(64), to_tensor()}});
class ImageFolder : public Dataset {
 public:
  /// Where no transform fixes the size, all images have that of the first whose header can be read.
  /// Throws: DataError for a folder that is missing, has no classes or an empty class, or other files
  /// where they are rejected; ConfigError for transforms that cannot be used.
  explicit ImageFolder(const std::string& path, const ImageFolderOptions& options = {});
  ~ImageFolder() override;

  std::int64_t size() const override { return index_.size(); }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const override;
  /// The file's path.
  std::string describe(std::int64_t index) const override { return index_.path(index); }
  std::vector<std::string> classes() const override { return index_.classes(); }
  /// Of all names below the folder, and the sizes of at most 1,024 files, spread over all of them.
  std::string fingerprint() const override;

  /// The label of a sample, without reading its image. Throws: UsageError for an index that is not in 0 ..
  /// size() - 1.
  std::int64_t label(std::int64_t index) const { return index_.label(index); }
  /// The files of the samples, in the order of their indices.
  const FolderIndex& files() const { return index_; }

 private:
  ImageSize common_size(const DecodeOptions& decode) const;
  std::span<const std::byte> file_bytes(std::int64_t index) const;

  FolderIndex index_;
  TransformPipeline pipeline_;
  bool channels_last_;
  int root_ = -1;
  std::unique_ptr<EncodedCache> cache_;
};

}  // namespace cohort::data
