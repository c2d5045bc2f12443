#include "cohort/models/summary.h"

#include <ATen/ops/equal.h>
#include <torch/nn/modules/linear.h>

#include "cohort/models/registry.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

ModelSummary summary_of(const std::string& name, std::int64_t size = 224) {
  ModelOptions options;
  options.name = name;
  options.image_size = size;
  torch::nn::AnyModule model = make_model(options);
  return summarize(model, {1, 3, size, size});
}

struct Published {
  const char* name;
  std::int64_t parameters;
  double giga_multiply_adds;
};

class PublishedTest : public testing::TestWithParam<Published> {};

// torchvision's own figures: num_params and _ops of its weights.
TEST_P(PublishedTest, ParametersAndMultiplyAddsAreThePublishedOnes) {
  const ModelSummary summary = summary_of(GetParam().name);
  EXPECT_EQ(summary.num_parameters, GetParam().parameters);
  EXPECT_EQ(summary.num_trainable_parameters, GetParam().parameters);
  EXPECT_EQ(summary.parameter_bytes, 4 * GetParam().parameters);
  EXPECT_NEAR(static_cast<double>(summary.multiply_adds) / 1e9, GetParam().giga_multiply_adds, 0.0006);
}

INSTANTIATE_TEST_SUITE_P(
    Models, PublishedTest,
    testing::Values(Published{"vgg11", 132863336, 7.609}, Published{"vgg16", 138357544, 15.470},
                    Published{"vgg19_bn", 143678248, 19.632}, Published{"resnet18", 11689512, 1.814},
                    Published{"resnet34", 21797672, 3.664}, Published{"resnet50", 25557032, 4.089}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(SummaryTest, RowsHoldHandComputedNumbers) {
  ModelOptions options = quick_options();
  torch::nn::AnyModule model = make_model(options);
  const ModelSummary summary = summarize(model, {2, 1, 28, 28});
  ASSERT_TRUE(summary.observed);
  const LayerRow& convolution = summary.rows[0];
  EXPECT_EQ(convolution.name, "features.0");
  EXPECT_EQ(convolution.type, "Conv2d");
  EXPECT_EQ(convolution.output_shape, (std::vector<std::int64_t>{2, 16, 28, 28}));
  EXPECT_EQ(convolution.num_parameters, 16 * 9 + 16);
  EXPECT_EQ(convolution.num_bytes, 4 * (16 * 9 + 16));
  EXPECT_EQ(convolution.flops, 2 * 9 * 2 * 16 * 28 * 28);
  const LayerRow& norm = summary.rows[1];
  EXPECT_EQ(norm.type, "BatchNorm2d");
  EXPECT_EQ(norm.num_parameters, 32);
  EXPECT_EQ(norm.num_bytes, 4 * (32 + 32) + 8);
  EXPECT_EQ(norm.flops, 2 * 2 * 16 * 28 * 28);
  EXPECT_EQ(summary.rows[2].type, "ReLU");
  EXPECT_EQ(summary.rows[2].flops, 2 * 16 * 28 * 28);
  EXPECT_EQ(summary.rows[3].type, "MaxPool2d");
  EXPECT_EQ(summary.rows[3].flops, 4 * 2 * 16 * 14 * 14);
  const LayerRow& pool = summary.rows[summary.rows.size() - 2];
  EXPECT_EQ(pool.name, "avgpool");
  EXPECT_EQ(pool.flops, 2 * 128 * 1 * 1);
  const LayerRow& linear = summary.rows.back();
  EXPECT_EQ(linear.name, "classifier.0");
  EXPECT_EQ(linear.flops, 2 * 2 * 128 * 10);
  std::int64_t flops = 0;
  for (const LayerRow& row : summary.rows) flops += row.flops;
  EXPECT_EQ(summary.flops, flops);
  EXPECT_TRUE(model.ptr()->is_training());
}

TEST(SummaryTest, TextNamesLayersAndTotals) {
  const std::string text = to_text(summary_of("vgg16_bn", 64));
  EXPECT_PRED2(contains, text, "VGG: input 1 x 3 x 64 x 64, output 1 x 1000");
  EXPECT_PRED2(contains, text, "features.43");
  EXPECT_PRED2(contains, text, "138,365,992 (138,365,992 trainable), 553.46 MB");
  EXPECT_PRED2(contains, text, "a multiply-add is 2");
}

TEST(SummaryTest, ALayerThatRunsTwiceCountsItsParametersOnce) {
  const ModelSummary summary = summary_of("resnet18", 64);
  std::int64_t parameters = 0;
  for (const LayerRow& row : summary.rows) parameters += row.num_parameters;
  EXPECT_EQ(parameters, summary.num_parameters);
}

TEST(SummaryTest, AModelThatReportsNothingIsListedWithoutShapes) {
  torch::nn::AnyModule model(torch::nn::Linear(3, 4));
  const ModelSummary summary = summarize(model, {2, 3});
  EXPECT_FALSE(summary.observed);
  EXPECT_EQ(summary.num_parameters, 16);
  EXPECT_EQ(summary.output_shape, (std::vector<std::int64_t>{2, 4}));
  EXPECT_PRED2(contains, to_text(summary), "does not report its layers");
}

}  // namespace
}  // namespace cohort::models
