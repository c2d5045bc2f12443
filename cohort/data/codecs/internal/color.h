#pragma once

#include <cstdint>

/// Conversions of rows of pixels, with Pillow's arithmetic.
namespace cohort::data {

/// Returns the luma of a colour: Pillow's integer form of ITU-R 601-2.
constexpr std::uint8_t luma(std::uint8_t red, std::uint8_t green, std::uint8_t blue) {
  return static_cast<std::uint8_t>((red * 19595u + green * 38470u + blue * 7471u + 0x8000u) >> 16);
}

/// Writes the luma of `count` RGB pixels; `out` may be `rgb`.
void rgb_to_gray(const std::uint8_t* rgb, std::int64_t count, std::uint8_t* out);
/// Writes `count` pixels whose three channels are equal.
void gray_to_rgb(const std::uint8_t* gray, std::int64_t count, std::uint8_t* out);
/// Writes `count` RGB pixels from CMYK as JPEG files of Adobe's kind hold it: 255 is no ink.
void inverted_cmyk_to_rgb(const std::uint8_t* cmyk, std::int64_t count, std::uint8_t* out);
/// Writes `count` bytes from big-endian 16-bit values: above 255 counts as 255, as in Pillow's mode I;16.
void gray16_to_gray(const std::uint8_t* gray16, std::int64_t count, std::uint8_t* out);

}  // namespace cohort::data
