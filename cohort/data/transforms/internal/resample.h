#pragma once

#include <cstdint>
#include <vector>

#include "cohort/data/image.h"

/// Antialiased bilinear resizing with Pillow's arithmetic: the same bytes come out.
namespace cohort::data {

/// Pixels that lie in somebody else's memory. Rows are `stride` bytes apart, pixels without gaps.
struct PixelView {
  const std::uint8_t* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t channels = 0;
  const std::uint8_t* row(std::int64_t y) const { return data + y * stride; }
};

/// For each output position along one axis, which inputs count and how much. Weights are fixed-point numbers
/// with kWeightBits fraction bits.
struct ResampleWeights {
  static constexpr int kWeightBits = 32 - 8 - 2;
  std::int64_t in = 0, out = 0;
  std::int64_t max_taps = 0;
  std::vector<std::int32_t> first;    ///< [out]
  std::vector<std::int32_t> taps;     ///< [out]
  std::vector<std::int32_t> weights;  ///< [out][max_taps], zero after `taps`

  /// Afterwards these are the weights from `in` to `out` pixels; memory is reused.
  void compute(std::int64_t in_size, std::int64_t out_size);

 private:
  std::vector<double> scratch_;
};

/// Resizes images; keeps its scratch memory. Threads: one caller at a time.
class Resampler {
 public:
  /// Writes `in`, brought to `size`, to `out`, which must not be where `in` lies.
  void resize(const PixelView& in, ImageSize size, Image& out);

 private:
  void resize_width(const PixelView& in, std::int64_t width, std::uint8_t* out);
  void resize_height(const PixelView& in, std::int64_t height, std::uint8_t* out);

  ResampleWeights horizontal_;
  ResampleWeights vertical_;
  std::vector<std::uint8_t> between_;  ///< the image after the first of two passes
  std::vector<std::uint8_t> columns_;
  std::vector<std::uint8_t> result_;
  std::vector<std::int32_t> sums_;
};

}  // namespace cohort::data
