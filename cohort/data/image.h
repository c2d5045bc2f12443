#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// Images in memory, and the words that codecs and transforms share. No LibTorch.
namespace cohort::data {

/// Height first, as in tensors.
struct ImageSize {
  std::int64_t height = 0;
  std::int64_t width = 0;
  friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

/// A rectangle in pixels. Where a transform says so it may reach outside of its image: there is black.
struct Region {
  std::int64_t top = 0;
  std::int64_t left = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  friend bool operator==(const Region&, const Region&) = default;
};

/// What an image is turned into when it is decoded; the values are as of Pillow's `convert`.
enum class ColorMode { kRgb, kGray };

/// Returns the number of channels of an image decoded to `color`.
constexpr std::int64_t num_channels(ColorMode color) {
  return color == ColorMode::kRgb ? 3 : 1;
}

/// Eight bits per channel, rows from the top, channels last, without gaps.
/// Shapes: pixels is [height, width, channels]; channels is 1 or 3.
struct Image {
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t channels = 0;
  std::vector<std::uint8_t> pixels;

  /// Height and width, without the channels.
  ImageSize size() const { return {height, width}; }
  /// Afterwards the image has this shape; its pixels are unspecified, its memory is reused.
  void reshape(std::int64_t new_height, std::int64_t new_width, std::int64_t new_channels) {
    height = new_height;
    width = new_width;
    channels = new_channels;
    pixels.resize(static_cast<size_t>(height * width * channels));
  }
};

/// How an image lies in a float buffer: [C, H, W] or [H, W, C].
enum class Layout { kChannelsFirst, kChannelsLast };

}  // namespace cohort::data
