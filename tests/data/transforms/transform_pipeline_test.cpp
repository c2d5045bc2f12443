#include "cohort/data/transforms/transform_pipeline.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "../codecs/golden.h"
#include "cohort/base/error.h"
#include "cohort/data/transforms/internal/resample.h"
#include "cohort/data/transforms/transform_registry.h"
#include "tests/support/messages.h"

namespace cohort::data {
namespace {

using test::expect_in;

const std::vector<double> kMean = {0.485, 0.456, 0.406}, kStd = {0.229, 0.224, 0.225};

base::RandomStream stream(uint64_t position = 0) {
  return {3, 0, position, base::Purpose::kTransform};
}

size_t count_of(const ImageShape& shape) {
  return static_cast<size_t>(shape[0] * shape[1] * shape[2]);
}

std::vector<float> run_file(const TransformPipeline& pipeline, const std::string& name, uint64_t position,
                            Layout layout) {
  std::vector<float> out(count_of(pipeline.output_shape()));
  base::RandomStream random = stream(position);
  pipeline.run_encoded(golden_bytes(name), name, random, out.data(), layout);
  return out;
}

std::string message_of(const std::vector<TransformSpec>& specs, ColorMode color = ColorMode::kRgb) {
  try {
    TransformPipeline pipeline(specs, color);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

void expect_torchvisions(const std::string& name, std::vector<TransformSpec> specs) {
  specs.push_back(to_tensor());
  specs.push_back(normalize(kMean, kStd));
  const std::string& want = golden().at("pipeline_" + name + ".float");
  const std::vector<float> got =
      run_file(TransformPipeline(specs), "jpeg_420.file", 0, Layout::kChannelsFirst);
  ASSERT_EQ(got.size() * sizeof(float), want.size()) << name;
  EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0) << name;
}

TEST(TransformPipelineTest, EvaluationGivesTorchvisionsFloatsBitForBit) {
  expect_torchvisions("resize_crop", {resize(15), center_crop(14)});
  expect_torchvisions("crop_pads", {center_crop(24)});
  expect_torchvisions("grey_of_three", {resize(ImageSize{12, 30}), grayscale(3)});
}

/// Expects the bytes of golden `name` from jpeg_420 by `spec`, when chance gives `wanted`.
void expect_bytes_of_torchvision(const std::string& name, const TransformSpec& spec,
                                 const CropResizeOp& wanted) {
  const auto transform = make_transform(spec);
  uint64_t position = 0;
  for (;; ++position) {
    ASSERT_LT(position, 100000U) << name << ": no stream gives these parameters";
    base::RandomStream random = stream(position);
    const CropResizeOp op = transform->plan({19, 27}, random);
    if (op.region == wanted.region && op.size == wanted.size && op.mirror == wanted.mirror) break;
  }
  TransformPipeline pipeline({spec, to_tensor()});
  pipeline.set_input_size({19, 27});
  const std::vector<float> got = run_file(pipeline, "jpeg_420.file", position, Layout::kChannelsLast);
  const std::vector<uint8_t> want = golden_pixels(name);
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {  // a difference of 1/255 would do, but there is none
    ASSERT_EQ(got[i], static_cast<float>(want[i]) / 255.0f) << name << ": value " << i;
  }
}

TEST(TransformPipelineTest, RandomTransformsGiveTorchvisionsPixelsAtTheSameParameters) {
  int crops = 0, pads = 0;
  for (const auto& [name, bytes] : golden()) {
    int top = 0, left = 0, height = 0, width = 0, new_height = 0, new_width = 0, padding = 0, size = 0;
    if (std::sscanf(name.c_str(), "resized_crop_%d_%d_%dx%d.to_%dx%d", &top, &left, &height, &width,
                    &new_height, &new_width) == 6) {
      // A range of one value leaves the place alone to chance.
      const double scale = height * width / (19.0 * 27.0), ratio = static_cast<double>(width) / height;
      const TransformSpec spec{"RandomResizedCrop",
                               {{"size", {static_cast<double>(new_height), static_cast<double>(new_width)}},
                                {"scale", {scale, scale}},
                                {"ratio", {ratio, ratio}}}};
      expect_bytes_of_torchvision(name, spec, {{top, left, height, width}, {new_height, new_width}, false});
      ++crops;
    } else if (std::sscanf(name.c_str(), "pad_crop_%d_%d_%d.to_%d", &padding, &top, &left, &size) == 4) {
      expect_bytes_of_torchvision(name, random_crop(size, padding),
                                  {{top - padding, left - padding, size, size}, {size, size}, false});
      ++pads;
    }
  }
  EXPECT_EQ(crops, 4);
  EXPECT_EQ(pads, 4);
  expect_bytes_of_torchvision("hflip", random_horizontal_flip(), {{0, 0, 19, 27}, {19, 27}, true});
}

TEST(TransformPipelineTest, TrainingIsDecodeCropResizeFlipNormaliseByHand) {
  const TransformPipeline pipeline(
      {random_resized_crop(16), random_horizontal_flip(), to_tensor(), normalize(kMean, kStd)});
  int flips = 0;
  for (uint64_t position = 0; position < 40; ++position) {
    const std::vector<float> got = run_file(pipeline, "jpeg_420.file", position, Layout::kChannelsLast);
    base::RandomStream random = stream(position);
    const CropResizeOp crop = make_transform(random_resized_crop(16))->plan({19, 27}, random);
    const bool mirror = make_transform(random_horizontal_flip())->plan(crop.size, random).mirror;
    flips += mirror ? 1 : 0;
    const std::vector<uint8_t> whole = golden_pixels("jpeg_420.rgb");
    const Region& region = crop.region;
    Image resized;
    Resampler().resize(
        {whole.data() + (region.top * 27 + region.left) * 3, 27 * 3, region.height, region.width, 3},
        crop.size, resized);
    for (int64_t y = 0; y < 16; ++y) {
      for (int64_t x = 0; x < 16; ++x) {
        for (int64_t c = 0; c < 3; ++c) {
          const auto k = static_cast<size_t>(c);
          const auto byte = resized.pixels[static_cast<size_t>((y * 16 + (mirror ? 15 - x : x)) * 3 + c)];
          const float want = (static_cast<float>(byte) / 255.0f - static_cast<float>(kMean[k])) /
                             static_cast<float>(kStd[k]);
          ASSERT_EQ(got[static_cast<size_t>((y * 16 + x) * 3 + c)], want)
              << position << ": " << y << ", " << x;
        }
      }
    }
  }
  EXPECT_GT(flips, 8);
  EXPECT_LT(flips, 32);
}

TEST(TransformPipelineTest, LayoutsHoldTheSameNumbers) {
  const TransformPipeline pipeline({random_resized_crop(10), random_horizontal_flip(), to_tensor()});
  for (uint64_t position = 0; position < 6; ++position) {
    const std::vector<float> first = run_file(pipeline, "jpeg_444.file", position, Layout::kChannelsFirst);
    const std::vector<float> last = run_file(pipeline, "jpeg_444.file", position, Layout::kChannelsLast);
    for (size_t pixel = 0; pixel < 100; ++pixel) {
      for (size_t c = 0; c < 3; ++c) {
        ASSERT_EQ(first[c * 100 + pixel], last[pixel * 3 + c]);
      }
    }
  }
}

TEST(TransformPipelineTest, EncodedIsDecodedAndThenRunForAnyOrderOfTransforms) {
  const std::vector<std::vector<TransformSpec>> lists = {
      {random_crop(17), random_horizontal_flip(), to_tensor()},
      {random_crop(25, 5, true), to_tensor()},
      {random_horizontal_flip(1), random_crop(13), random_horizontal_flip(), to_tensor()},
      {random_horizontal_flip(1), center_crop(23), to_tensor()},
      {random_horizontal_flip(1), random_resized_crop(11), grayscale(), to_tensor()},
      {grayscale(3), resize(ImageSize{9, 8}), to_tensor()},
      {center_crop(12), resize(ImageSize{20, 20}), random_crop(8, 2), random_horizontal_flip(1), grayscale(),
       to_tensor()},
  };
  for (const ColorMode color : {ColorMode::kRgb, ColorMode::kGray}) {
    for (const auto& specs : lists) {
      const TransformPipeline pipeline(specs, color);
      for (uint64_t position = 0; position < 8; ++position) {
        for (const char* name :
             {"jpeg_420.file", "jpeg_cmyk.file", "png_palette.file", "png_interlaced.file"}) {
          if (std::string(name).starts_with("png") && specs[0].name == "RandomCrop" &&
              specs[0].args.at("size")[0] == 17) {
            continue;  // 11 x 13 is too small
          }
          if (specs.size() > 3 && std::string(name).starts_with("png") && specs[1].name == "RandomCrop") {
            continue;
          }
          Image image;
          decode_image(golden_bytes(name), color, name, image);
          std::vector<float> want(count_of(pipeline.output_shape()));
          base::RandomStream random = stream(position);
          pipeline.run(image, random, want.data(), Layout::kChannelsFirst);
          EXPECT_EQ(run_file(pipeline, name, position, Layout::kChannelsFirst), want) << name;
        }
      }
    }
  }
}

TEST(TransformPipelineTest, MirroringThenCroppingIsDoneInThatOrder) {
  Image image;
  image.reshape(1, 4, 1);
  image.pixels = {0, 51, 102, 255};
  const TransformPipeline pipeline({random_horizontal_flip(1), center_crop(2), to_tensor()},
                                   ColorMode::kGray);
  float out[4] = {9, 9, 9, 9};
  base::RandomStream random = stream();
  pipeline.run(image, random, out, Layout::kChannelsFirst);
  EXPECT_EQ(std::vector<float>(out, out + 4),
            (std::vector<float>{0.4f, 0.2f, 0.0f, 0.0f}));  // a black row below
}

TEST(TransformPipelineTest, OneValueOfMeanServesAllChannels) {
  const TransformPipeline pipeline({center_crop(8), to_tensor(), normalize({0.5}, {0.25})});
  const TransformPipeline same({center_crop(8), to_tensor(), normalize({0.5, 0.5, 0.5}, {0.25, 0.25, 0.25})});
  EXPECT_EQ(run_file(pipeline, "jpeg_420.file", 0, Layout::kChannelsLast),
            run_file(same, "jpeg_420.file", 0, Layout::kChannelsLast));
}

TEST(TransformPipelineTest, AShapeThatDependsOnTheImagesMustBeSaid) {
  TransformPipeline pipeline({random_horizontal_flip(), to_tensor()}, ColorMode::kGray);
  EXPECT_FALSE(pipeline.has_output_shape());
  EXPECT_THROW(pipeline.output_shape(), UsageError);
  pipeline.set_input_size({28, 28});
  EXPECT_EQ(pipeline.output_shape(), (ImageShape{1, 28, 28}));
  std::vector<float> out(28 * 28);
  base::RandomStream random = stream();
  pipeline.run_encoded(golden_bytes("jpeg_grey.file"), "gray", random, out.data(), Layout::kChannelsFirst);
  try {
    pipeline.run_encoded(golden_bytes("jpeg_420.file"), "train/a.jpg", random, out.data(),
                         Layout::kChannelsFirst);
    FAIL();
  } catch (const DataError& error) {
    expect_in(error.what(), {"train/a.jpg", "1x19x27", "expected 1x28x28", "add Resize"});
  }
  EXPECT_EQ(TransformPipeline({random_crop(24), grayscale(3), to_tensor()}, ColorMode::kGray).output_shape(),
            (ImageShape{3, 24, 24}));
}

TEST(TransformPipelineTest, WhatATransformRejectsIsNamed) {
  const TransformPipeline pipeline({random_horizontal_flip(), random_crop(32), to_tensor()});
  try {
    run_file(pipeline, "jpeg_420.file", 0, Layout::kChannelsFirst);
    FAIL();
  } catch (const DataError& error) {
    expect_in(error.what(), {"jpeg_420.file: ", "RandomCrop: got an image of 19x27", "at least 32x32"});
  }
  Image image;
  image.reshape(1, 60000, 3);
  const TransformPipeline tall({resize(8), center_crop(2), to_tensor()});
  float out[12];
  base::RandomStream random = stream();
  try {
    tall.run(image, random, out, Layout::kChannelsFirst, "long.png");
    FAIL();
  } catch (const DataError& error) {
    expect_in(error.what(), {"long.png: ", "Resize: an image of 1x60000 would become 480000 pixels long"});
  }
}

TEST(TransformPipelineTest, WrongOrdersAreRejected) {
  expect_in(message_of({center_crop(8)}), {"there is no ToTensor", "Try: first what works on images"});
  expect_in(message_of({normalize(kMean, kStd), to_tensor()}), {"Normalize stands before ToTensor"});
  expect_in(message_of({to_tensor(), center_crop(8)}), {"CenterCrop stands after ToTensor"});
  expect_in(message_of({to_tensor(), to_tensor()}), {"ToTensor stands after ToTensor"});
  expect_in(message_of({to_tensor(), normalize(kMean, kStd), normalize(kMean, kStd)}),
            {"Normalize stands twice"});
  expect_in(message_of({to_tensor(), {"Normalise", {}}}), {"unknown transform Normalise", "Try: Normalize"});
}

TEST(TransformPipelineTest, MeansMustFitTheChannels) {
  expect_in(message_of({to_tensor(), normalize(kMean, kStd)}, ColorMode::kGray),
            {"Normalize.mean: got 3 values, expected 1 (images are gray)"});
  expect_in(message_of({to_tensor(), normalize({0.1, 0.2}, {1, 1})}),
            {"Normalize.mean: got 2 values, expected 3"});
  expect_in(message_of({to_tensor(), normalize(kMean, {1, 0, 1})}), {"Normalize.std: got 0"});
  expect_in(message_of({to_tensor(), {"Normalize", {{"mean", {0.5}}}}}), {"Normalize.std: missing"});
  expect_in(message_of({to_tensor(), {"Normalize", {{"mean", {0.5}}, {"std", {1}}, {"inplace", {1}}}}}),
            {"Normalize has no argument inplace"});
}

TEST(TransformPipelineTest, AnImageOfOtherChannelsIsAUsageError) {
  const TransformPipeline pipeline({center_crop(2), to_tensor()});
  Image image;
  image.reshape(4, 4, 1);
  float out[12];
  base::RandomStream random = stream();
  EXPECT_THROW(pipeline.run(image, random, out, Layout::kChannelsFirst), UsageError);
}

}  // namespace
}  // namespace cohort::data
