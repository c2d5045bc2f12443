#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/random.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/image.h"
#include "cohort/data/transforms/transform.h"

/// From an image, or a file's bytes, to normalised floats in the caller's buffer.
///
///     TransformPipeline pipeline(
///         {random_resized_crop(64), random_horizontal_flip(), to_tensor(), normalize(mean, std)});
///     pipeline.run_encoded(bytes, "cat.jpg", random, buffer, Layout::kChannelsLast);
namespace cohort::data {

/// [channels, height, width], whatever the layout.
using ImageShape = std::array<std::int64_t, 3>;

/// A list of transforms, then ToTensor, then Normalize or nothing. Immutable but for `set_input_size`.
/// Threads: any number may run one pipeline; scratch memory is per thread and reused.
class TransformPipeline {
 public:
  /// Decodes images to `color`. Throws: ConfigError for specifications that cannot be used or stand in a
  /// wrong order.
  explicit TransformPipeline(const std::vector<TransformSpec>& specs, ColorMode color = ColorMode::kRgb,
                             const DecodeOptions& decode = {});
  ~TransformPipeline();
  TransformPipeline(TransformPipeline&&) noexcept;
  TransformPipeline& operator=(TransformPipeline&&) noexcept;

  /// True when every image comes out in one shape; else say `set_input_size` first.
  bool has_output_shape() const;
  /// For transforms that keep the size they are given: images are of size `in`, and others are rejected.
  void set_input_size(ImageSize in);
  /// Returns the shape that every image comes out in. Throws: UsageError while it is not known.
  ImageShape output_shape() const;
  /// What images are decoded to, before the first transform.
  ColorMode color() const { return color_; }

  /// Writes the transformed image to `out`, which holds as many floats as `output_shape` says.
  /// Aliases: `image` is scratch afterwards. `name` stands in the messages.
  /// Throws: DataError when this image cannot be brought to `output_shape`; UsageError for a wrong channel
  /// count.
  void run(Image& image, base::RandomStream& random, float* out, Layout layout,
           const std::string& name = "image") const;

  /// The same floats as `decode_image` and then `run`, for less work when the first transform cuts.
  void run_encoded(std::span<const std::byte> file, const std::string& name, base::RandomStream& random,
                   float* out, Layout layout) const;

 private:
  void run_from(Image& image, const CropResizeOp* first, base::RandomStream& random, float* out,
                Layout layout, const std::string& name) const;
  void check_order(const std::vector<TransformSpec>& specs) const;
  void build_table(const TransformSpec* normalize);

  std::vector<std::unique_ptr<Transform>> transforms_;
  ColorMode color_;
  DecodeOptions decode_;
  std::int64_t channels_ = 0;
  ImageSize size_{};
  std::vector<float> table_;  ///< [channels][256]: what ToTensor and Normalize make of a byte
};

}  // namespace cohort::data
