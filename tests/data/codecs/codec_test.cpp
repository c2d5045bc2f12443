#include "cohort/data/codecs/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <thread>

#include "golden.h"

namespace cohort::data {
namespace {

std::vector<std::string> case_names(const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : golden()) {
    if (name.starts_with(prefix) && name.ends_with(".file")) {
      names.push_back(name.substr(0, name.size() - 5));
    }
  }
  return names;
}

void expect_pixels_of_pillow(const std::string& name) {
  Image image;
  decode_image(golden_bytes(name + ".file"), ColorMode::kRgb, name, image);
  EXPECT_EQ(image.channels, 3) << name;
  EXPECT_TRUE(image.pixels == golden_pixels(name + ".rgb")) << name;
  decode_image(golden_bytes(name + ".file"), ColorMode::kGray, name, image);
  EXPECT_EQ(image.channels, 1) << name;
  EXPECT_TRUE(image.pixels == golden_pixels(name + ".grey")) << name;
}

Image make_image(int64_t height, int64_t width, int64_t channels) {
  Image image;
  image.reshape(height, width, channels);
  for (int64_t i = 0; i < height * width * channels; ++i) {
    const auto x = static_cast<double>(i / channels % width), y = static_cast<double>(i / channels / width);
    image.pixels[static_cast<size_t>(i)] = static_cast<uint8_t>(
        127 + 100 * std::sin(x / 6 + static_cast<double>(i % channels)) * std::cos(y / 9));
  }
  return image;
}

TEST(CodecTest, JpegPixelsAreThoseOfPillow) {
  const std::vector<std::string> names = case_names("jpeg_");
  ASSERT_GE(names.size(), 17u);
  for (const std::string& name : names) {
    expect_pixels_of_pillow(name);
  }
}

TEST(CodecTest, PngPixelsAreThoseOfPillow) {
  const std::vector<std::string> names = case_names("png_");
  ASSERT_GE(names.size(), 18u);
  for (const std::string& name : names) {
    expect_pixels_of_pillow(name);
  }
}

TEST(CodecTest, TheHeaderSaysFormatAndSize) {
  const ImageHeader jpeg = read_image_header(golden_bytes("jpeg_420.file"), "a");
  EXPECT_EQ(jpeg.format, ImageFormat::kJpeg);
  EXPECT_EQ(jpeg.size(), (ImageSize{19, 27}));
  const ImageHeader png = read_image_header(golden_bytes("png_rgb.file"), "a");
  EXPECT_EQ(png.format, ImageFormat::kPng);
  EXPECT_EQ(png.size(), (ImageSize{11, 13}));
}

TEST(CodecTest, PngKeepsEveryPixel) {
  for (const int64_t channels : {1, 3}) {
    const Image image = make_image(23, 31, channels);
    Image back;
    decode_image(encode_png(image), channels == 1 ? ColorMode::kGray : ColorMode::kRgb, "a", back);
    EXPECT_EQ(back.size(), image.size());
    EXPECT_TRUE(back.pixels == image.pixels);
  }
}

TEST(CodecTest, JpegIsCloserToTheImageTheHigherItsQuality) {
  for (const int64_t channels : {1, 3}) {
    const Image image = make_image(40, 56, channels);
    double last = 1e9;
    for (const int quality : {1, 50, 75, 95, 100}) {
      Image back;
      decode_image(encode_jpeg(image, quality), channels == 1 ? ColorMode::kGray : ColorMode::kRgb, "a",
                   back);
      ASSERT_EQ(back.pixels.size(), image.pixels.size());
      double error = 0;
      for (size_t i = 0; i < image.pixels.size(); ++i) {
        error += std::abs(int{image.pixels[i]} - int{back.pixels[i]});
      }
      error /= static_cast<double>(image.pixels.size());
      EXPECT_LE(error, last + 0.05) << "quality " << quality;
      last = error;
    }
    EXPECT_LT(last, channels == 1 ? 0.6 : 3.0);
  }
}

TEST(CodecTest, DecodersOfSeveralThreadsDoNotMeet) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        expect_pixels_of_pillow((t + i) % 2 == 0 ? "jpeg_420" : "png_palette");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace cohort::data
