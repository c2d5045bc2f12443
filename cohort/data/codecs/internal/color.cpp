#include "cohort/data/codecs/internal/color.h"

namespace cohort::data {

void rgb_to_gray(const uint8_t* rgb, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = luma(rgb[3 * i], rgb[3 * i + 1], rgb[3 * i + 2]);
  }
}

void gray_to_rgb(const uint8_t* gray, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[3 * i] = out[3 * i + 1] = out[3 * i + 2] = gray[i];
  }
}

void inverted_cmyk_to_rgb(const uint8_t* cmyk, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    // Adobe's JPEGs hold inverted values: 255 is no ink.
    const int paper = cmyk[4 * i + 3];
    for (int c = 0; c < 3; ++c) {
      // Division by 255, rounded to the nearest, without a division. As Pillow computes it.
      const int product = (255 - cmyk[4 * i + c]) * paper + 128;
      const int value = paper - (((product >> 8) + product) >> 8);
      out[3 * i + c] = static_cast<uint8_t>(value < 0 ? 0 : value);
    }
  }
}

void gray16_to_gray(const uint8_t* gray16, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    // As Pillow turns 16-bit gray into 8 bits: clipped, not scaled. PNG is big-endian, so the first byte is
    // the high one.
    out[i] = gray16[2 * i] != 0 ? 255 : gray16[2 * i + 1];
  }
}

}  // namespace cohort::data
