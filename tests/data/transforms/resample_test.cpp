#include "cohort/data/transforms/internal/resample.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "../codecs/golden.h"

namespace cohort::data {
namespace {

TEST(ResampleTest, BytesAreThoseOfPillow) {
  int compared = 0;
  Resampler resampler;
  for (const auto& [name, bytes] : golden()) {
    int index = 0, height = 0, width = 0, new_height = 0, new_width = 0;
    char mode[8] = "";
    if (std::sscanf(name.c_str(), "resize_%d_%dx%d.to_%dx%d.%7s", &index, &height, &width, &new_height,
                    &new_width, mode) != 6) {
      continue;
    }
    const std::string source = name.substr(0, name.find('.')) + "." + mode;
    const std::vector<uint8_t> pixels = golden_pixels(source);
    const int64_t channels = std::string(mode) == "rgb" ? 3 : 1;
    Image out;
    resampler.resize({pixels.data(), width * channels, height, width, channels}, {new_height, new_width},
                     out);
    EXPECT_TRUE(out.pixels == golden_pixels(name)) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 24);
}

TEST(ResampleTest, ReadsNothingOutsideOfTheView) {
  // The view lies at the very end of its memory and is narrower than its rows: a sanitizer sees a byte too
  // many, and the values beside it, which differ, would show.
  Resampler resampler;
  for (const int64_t channels : {1, 3}) {
    const int64_t stride = 40 * channels, width = 21, height = 37;
    std::vector<uint8_t> memory(static_cast<size_t>((height - 1) * stride + width * channels), 255);
    for (int64_t y = 0; y < height; ++y) {
      std::fill_n(memory.begin() + y * stride, width * channels, uint8_t{100});
    }
    for (const ImageSize size : {ImageSize{16, 16}, {60, 13}, {5, 50}, {37, 9}, {11, 21}, {37, 21}, {1, 1}}) {
      Image out;
      resampler.resize({memory.data(), stride, height, width, channels}, size, out);
      EXPECT_EQ(out.size(), size);
      EXPECT_EQ(std::count(out.pixels.begin(), out.pixels.end(), uint8_t{100}),
                static_cast<ptrdiff_t>(out.pixels.size()));
    }
  }
}

TEST(ResampleTest, WeightsOfEveryPixelSumToOne) {
  ResampleWeights weights;
  for (const auto& [in, out] : {std::pair{256, 64}, {64, 256}, {1, 7}, {7, 1}, {100, 99}, {3, 1000}}) {
    weights.compute(in, out);
    for (int64_t x = 0; x < out; ++x) {
      int64_t sum = 0;
      for (int64_t k = 0; k < weights.taps[static_cast<size_t>(x)]; ++k) {
        sum += weights.weights[static_cast<size_t>(x * weights.max_taps + k)];
      }
      EXPECT_NEAR(static_cast<double>(sum), 1 << ResampleWeights::kWeightBits,
                  static_cast<double>(weights.max_taps));
    }
  }
}

}  // namespace
}  // namespace cohort::data
