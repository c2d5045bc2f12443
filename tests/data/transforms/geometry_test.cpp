#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <sstream>

#include "../codecs/golden.h"
#include "cohort/base/error.h"
#include "cohort/data/transforms/transform.h"
#include "cohort/data/transforms/transform_registry.h"
#include "tests/support/messages.h"

namespace cohort::data {
namespace {

using test::expect_in;

base::RandomStream stream(uint64_t position) {
  return {3, 0, position, base::Purpose::kTransform};
}

CropResizeOp plan(const TransformSpec& spec, ImageSize in, uint64_t position = 0) {
  base::RandomStream random = stream(position);
  return make_transform(spec)->plan(in, random);
}

std::string message_of(const TransformSpec& spec) {
  try {
    make_transform(spec);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(GeometryTest, ResizeBringsTheShorterSideToSizeAsTorchvisionDoes) {
  std::istringstream lines(golden().at("resize_sizes.text"));
  int64_t height = 0, width = 0, size = 0, new_height = 0, new_width = 0;
  int count = 0;
  while (lines >> height >> width >> size >> new_height >> new_width) {
    if (new_height == 0 || new_width == 0) {
      continue;  // torchvision fails on these
    }
    EXPECT_EQ(make_transform(resize(size))->output_size({height, width}), (ImageSize{new_height, new_width}));
    ++count;
  }
  EXPECT_GT(count, 80);
  EXPECT_EQ(plan(resize(ImageSize{7, 9}), {100, 3}).size, (ImageSize{7, 9}));
  const TransformSpec limited{"Resize", {{"size", {100}}, {"max_size", {150}}}};
  EXPECT_EQ(plan(limited, {100, 400}).size, (ImageSize{37, 150}));
}

TEST(GeometryTest, CenterCropRoundsHalfToEvenAndPadsWhatIsMissing) {
  EXPECT_EQ(plan(center_crop(4), {7, 9}).region, (Region{2, 2, 4, 4}));  // 1.5 and 2.5 both become 2
  EXPECT_EQ(plan(center_crop(8), {5, 20}).region, (Region{-1, 6, 8, 8}));
  EXPECT_EQ(plan(center_crop(5), {5, 5}).region, (Region{0, 0, 5, 5}));
}

TEST(GeometryTest, RandomCropReachesEveryPlaceAndNoOther) {
  std::set<int64_t> tops;
  for (uint64_t i = 0; i < 300; ++i) {
    const Region region = plan(random_crop(28, 4), {28, 28}, i).region;
    EXPECT_EQ(region.height, 28);
    tops.insert(region.top);
  }
  EXPECT_EQ(tops.size(), 9u);
  EXPECT_EQ(*tops.begin(), -4);
  EXPECT_EQ(*tops.rbegin(), 4);
}

TEST(GeometryTest, RandomCropOfASmallImageIsAnErrorOrPadded) {
  base::RandomStream random = stream(0);
  try {
    make_transform(random_crop(32))->plan({20, 40}, random);
    FAIL();
  } catch (const DataError& error) {
    expect_in(error.what(), {"RandomCrop", "20x40", "at least 32x32", "pad_if_needed"});
  }
  for (uint64_t i = 0; i < 50; ++i) {
    const Region region = plan(random_crop(32, 0, true), {20, 40}, i).region;
    EXPECT_GE(region.top, -12);
    EXPECT_LE(region.top, 0);
    EXPECT_GE(region.left, 0);
  }
}

TEST(GeometryTest, RandomResizedCropKeepsScaleAndRatio) {
  const ImageSize in{400, 500};
  double area = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    const CropResizeOp op = plan(random_resized_crop(64, {0.2, 0.5}), in, i);
    const Region& region = op.region;
    ASSERT_GE(region.top, 0);
    ASSERT_GE(region.left, 0);
    ASSERT_LE(region.top + region.height, in.height);
    ASSERT_LE(region.left + region.width, in.width);
    EXPECT_EQ(op.size, (ImageSize{64, 64}));
    const double share = static_cast<double>(region.height * region.width) / (400.0 * 500.0);
    const double ratio = static_cast<double>(region.width) / static_cast<double>(region.height);
    ASSERT_GT(share, 0.195);
    ASSERT_LT(share, 0.505);
    ASSERT_GT(ratio, 0.74);
    ASSERT_LT(ratio, 1.35);
    area += share;
  }
  EXPECT_NEAR(area / 4000, 0.35, 0.01);  // the middle of a uniform range
}

TEST(GeometryTest, RandomResizedCropDrawsTheLogarithmOfTheRatioAndTheAreaEvenly) {
  constexpr int kDraws = 20000;
  const auto transform = make_transform(random_resized_crop(64));
  double log_ratio = 0, area = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    base::RandomStream random = stream(i);
    const Region region = transform->plan({1000, 1000}, random).region;
    log_ratio += std::log(static_cast<double>(region.width) / static_cast<double>(region.height));
    area += static_cast<double>(region.height * region.width) / 1e6;
  }
  // In a square neither direction is preferred. A ratio drawn evenly from 3/4 to 4/3 would give 0.026
  // instead; the deviation of this mean is 0.001.
  EXPECT_NEAR(log_ratio / kDraws, 0, 0.007);
  // An area s of log ratio u fits where s <= exp(-|u|), else it is drawn again: the mean of s over where it
  // fits, with s from `least` and |u| to `most`. Its deviation is 0.002.
  const double least = 0.08, most = std::log(4.0 / 3.0);
  const double fits = (1 - std::exp(-most)) - least * most;
  const double sum = ((1 - std::exp(-2 * most)) / 2 - least * least * most) / 2;
  EXPECT_NEAR(area / kDraws, sum / fits, 0.01);  // 0.478
}

TEST(GeometryTest, RandomResizedCropFallsBackToTheMiddle) {
  // No crop of the whole area has an allowed ratio, so all ten tries fail.
  EXPECT_EQ(plan(random_resized_crop(8, {1, 1}), {10, 100}).region, (Region{0, 43, 10, 13}));
  EXPECT_EQ(plan(random_resized_crop(8, {1, 1}), {100, 10}).region, (Region{43, 0, 13, 10}));
}

TEST(GeometryTest, TheSameStreamGivesTheSamePlan) {
  for (uint64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(plan(random_resized_crop(9), {50, 60}, i).region,
              plan(random_resized_crop(9), {50, 60}, i).region);
  }
}

TEST(GeometryTest, FlipsAsOftenAsItShould) {
  int flips = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    flips += plan(random_horizontal_flip(0.3), {5, 5}, i).mirror ? 1 : 0;
  }
  EXPECT_NEAR(flips, 1200, 100);
  EXPECT_FALSE(plan(random_horizontal_flip(0), {5, 5}).mirror);
  EXPECT_TRUE(plan(random_horizontal_flip(1), {5, 5}).mirror);
}

TEST(TransformNamesTest, UnknownNamesAndArgumentsAreRejectedWithTheNearest) {
  expect_in(message_of({"RandomResizeCrop", {}}),
            {"unknown transform RandomResizeCrop", "Try: RandomResizedCrop"});
  expect_in(message_of({"resize", {}}), {"Try: Resize "});
  expect_in(message_of({"Resize", {{"size", {4}}, {"max_sise", {9}}}}),
            {"Resize has no argument max_sise", "max_size"});
}

TEST(TransformNamesTest, ValuesOutOfRangeAreRejected) {
  expect_in(message_of({"Resize", {}}), {"Resize.size: missing"});
  expect_in(message_of({"Resize", {{"size", {0}}}}), {"Resize.size: got 0, expected 1 to 65535"});
  expect_in(message_of({"Resize", {{"size", {2.5}}}}), {"got 2.5, expected a whole number"});
  expect_in(message_of({"Resize", {{"size", {1, 2, 3}}}}), {"got 3 values, expected 1 to 2"});
  expect_in(message_of({"Resize", {{"size", {9}}, {"max_size", {5}}}}), {"Resize.max_size: got 5"});
  expect_in(message_of({"RandomHorizontalFlip", {{"p", {1.5}}}}), {"RandomHorizontalFlip.p: got 1.5"});
  expect_in(message_of({"RandomHorizontalFlip", {{"p", {NAN}}}}), {"expected a finite number"});
  expect_in(message_of({"RandomResizedCrop", {{"size", {8}}, {"scale", {1, 0.5}}}}),
            {"RandomResizedCrop.scale: got [1, 0.5]", "the lower first"});
  expect_in(message_of({"RandomResizedCrop", {{"size", {8}}, {"ratio", {1}}}}), {"got 1 values, expected 2"});
  expect_in(message_of({"RandomCrop", {{"size", {8}}, {"padding", {1, 2, 3}}}}),
            {"got 3 values, expected 1, 2 or 4"});
  expect_in(message_of({"RandomCrop", {{"size", {8}}, {"padding", {-1}}}}), {"RandomCrop.padding: got -1"});
  expect_in(message_of({"Grayscale", {{"num_output_channels", {2}}}}), {"got 2, expected 1 or 3"});
}

TEST(TransformNamesTest, TheFirstArgumentNeedsNoName) {
  EXPECT_EQ(make_transform({"CenterCrop", {{"", {24}}}})->output_size({9, 9}), (ImageSize{24, 24}));
  expect_in(message_of({"CenterCrop", {{"", {24}}, {"size", {24}}}}), {"given twice"});
}

TEST(TransformNamesTest, UsersRegisterTheirOwn) {
  class TopHalf : public Transform {
   public:
    CropResizeOp plan(ImageSize in, base::RandomStream&) const override {
      return {{0, 0, in.height / 2, in.width}, {in.height / 2, in.width}, false};
    }
    ImageSize output_size(ImageSize in) const override { return {in.height / 2, in.width}; }
  };
  const auto factory = [](TransformArgs&) -> std::unique_ptr<Transform> {
    return std::make_unique<TopHalf>();
  };
  register_transform("TopHalf", "", factory);
  EXPECT_EQ(plan({"TopHalf", {}}, {10, 6}).size, (ImageSize{5, 6}));
  EXPECT_THROW(register_transform("TopHalf", "", factory), UsageError);
  EXPECT_THROW(register_transform("Resize", "", factory), UsageError);
  expect_in(message_of({"TopHalf", {{"", {1}}}}), {"takes no argument without a name"});
}

}  // namespace
}  // namespace cohort::data
