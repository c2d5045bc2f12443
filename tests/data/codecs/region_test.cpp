#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cohort/base/random.h"
#include "cohort/data/codecs/codec.h"
#include "golden.h"

// clang-format off: jpeglib.h needs <cstdio> before it
#include <jpeglib.h>
// clang-format on

namespace cohort::data {
namespace {

struct Encoding {
  int horizontal = 1, vertical = 1;  ///< of the first component; the others have 1
  bool progressive = false;
  int restart_rows = 0;
};

/// A JPEG with sampling factors that Pillow cannot write.
std::vector<std::byte> encode(int height, int width, const Encoding& how) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &data, &size);
  info.image_height = static_cast<JDIMENSION>(height);
  info.image_width = static_cast<JDIMENSION>(width);
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 80, TRUE);
  info.comp_info[0].h_samp_factor = how.horizontal;
  info.comp_info[0].v_samp_factor = how.vertical;
  info.restart_in_rows = how.restart_rows;
  if (how.progressive) {
    jpeg_simple_progression(&info);
  }
  jpeg_start_compress(&info, TRUE);
  base::RandomStream random(5, 0, static_cast<uint64_t>(height * width), base::Purpose::kUser);
  std::vector<unsigned char> row(static_cast<size_t>(width) * 3);
  for (int y = 0; y < height; ++y) {
    for (size_t i = 0; i < row.size(); ++i) {
      const double wave = 110 * std::sin(static_cast<double>(i) / 11) * std::cos(y / 6.0);
      row[i] = static_cast<unsigned char>(120 + wave + static_cast<double>(random.integer(0, 20)));
    }
    JSAMPROW pointer = row.data();
    jpeg_write_scanlines(&info, &pointer, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::vector<std::byte> file(size);
  std::memcpy(file.data(), data, size);
  std::free(data);
  return file;
}

void expect_regions_match(const std::vector<std::byte>& file, int count, base::RandomStream& random,
                          const std::string& what) {
  for (const ColorMode color : {ColorMode::kRgb, ColorMode::kGray}) {
    Image whole, part;
    decode_image(file, color, what, whole);
    for (int i = 0; i < count; ++i) {
      Region region;
      region.height = random.integer(1, whole.height + 1);
      region.width = random.integer(1, whole.width + 1);
      region.top = random.integer(0, whole.height - region.height + 1);
      region.left = random.integer(0, whole.width - region.width + 1);
      thread_decoder().open(file, color, what);
      thread_decoder().read(region, part);
      ASSERT_EQ(part.size(), (ImageSize{region.height, region.width}));
      const auto row = static_cast<size_t>(region.width * whole.channels);
      for (int64_t y = 0; y < region.height; ++y) {
        const int64_t at = ((region.top + y) * whole.width + region.left) * whole.channels;
        ASSERT_EQ(std::memcmp(&part.pixels[static_cast<size_t>(y) * row],
                              &whole.pixels[static_cast<size_t>(at)], row),
                  0)
            << what << ": row " << y << " of " << region.height << "x" << region.width << " at ("
            << region.top << ", " << region.left << ") in " << whole.height << "x" << whole.width;
      }
    }
  }
}

TEST(RegionTest, IsBitForBitWhatTheWholeImageHasThere) {
  base::RandomStream random(11, 0, 0, base::Purpose::kUser);
  for (const auto& [height, width] :
       {std::pair{256, 256}, {131, 97}, {97, 200}, {17, 33}, {64, 64}, {8, 300}}) {
    for (const auto& [horizontal, vertical] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4}}) {
      for (const bool progressive : {false, true}) {
        for (const int restart_rows : {0, 1}) {
          const Encoding how{horizontal, vertical, progressive, restart_rows};
          expect_regions_match(encode(height, width, how), 12, random,
                               std::to_string(horizontal) + "x" + std::to_string(vertical) +
                                   (progressive ? " progressive" : " baseline"));
        }
      }
    }
  }
}

TEST(RegionTest, HoldsForEveryKindOfFile) {
  base::RandomStream random(12, 0, 0, base::Purpose::kUser);
  for (const auto& [name, bytes] : golden()) {
    if (name.ends_with(".file")) {
      expect_regions_match(to_bytes(bytes), 8, random, name);
    }
  }
}

}  // namespace
}  // namespace cohort::data
