#pragma once

#include <cstdint>

#include "cohort/data/image.h"

namespace cohort::data {

/// What the first bytes of a file say that it is.
enum class ImageFormat { kJpeg, kPng };

/// What is decoded, and what is rejected.
struct DecodeOptions {
  /// An image of more pixels is rejected before it takes memory. The default is where Pillow rejects.
  std::int64_t max_pixels = 178'956'970;
  /// Takes what can be decoded of a JPEG whose data is damaged, in silence, as Pillow does. Truncated files
  /// are an error all the same.
  bool accept_damage = false;
};

/// What a file says about its image.
struct ImageHeader {
  ImageFormat format = ImageFormat::kJpeg;  ///< by the file's first bytes
  std::int64_t height = 0;
  std::int64_t width = 0;
  /// Of the image as it is stored, before any orientation or cut.
  ImageSize size() const { return {height, width}; }
};

}  // namespace cohort::data
