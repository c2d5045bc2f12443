#include "cohort/train/example_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace cohort::train {
namespace {

config::Config mlp_config(const std::vector<std::string>& overrides = {}) {
  return config::load_config_text(R"(
model: {name: mlp, num_classes: 4, options: {hidden: "8"}}
data: {type: synthetic, synthetic_train: 20, image_size: 4, color: gray, mean: [0.4], std: [0.3]}
train: {batch_size: 8, device: cpu, memory_format: contiguous}
)",
                                  "test.yaml", overrides);
}

ExampleStep example_step(const config::Config& config) {
  return {config, batch_plan(config.train, config.distributed, config.data, 1)};
}

TEST(ExampleStepTest, ABatchIsZerosOfTheDatasFields) {
  const ExampleStep step = example_step(mlp_config());
  EXPECT_EQ(step.input(3).size(0), 3);
  EXPECT_EQ(step.target(3).size(0), 3);
  EXPECT_EQ(step.batch_bytes(3), std::int64_t(step.input(3).nbytes() + step.target(3).nbytes()));
  EXPECT_EQ(step.runner_options().batch_size, 8);
  EXPECT_EQ(step.runner_options().name, "plain");
}

TEST(ExampleStepTest, TheStepLeavesTheGradientsOfTheRunnersModel) {
  for (const char* precision : {"f32", "bf16"}) {
    SCOPED_TRACE(precision);
    const ExampleStep step = example_step(mlp_config({base::concat("train.precision=", precision)}));
    const torch::nn::AnyModule model = step.make_model();
    const parallel::ModelRunner runner = parallel::make_model_runner(model, step.runner_options());
    const at::Tensor loss = step.loss(runner.forward, step.input(5), step.target(5));
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_GT(loss.item<float>(), 0);
    int calls = 0;
    step.run(runner, step.input(5), step.target(5), [&] { ++calls; });
    EXPECT_EQ(calls, 1);
    for (const at::Tensor& parameter : model.ptr()->parameters()) EXPECT_TRUE(parameter.grad().defined());
    EXPECT_FALSE(step.make_optimizer(*model.ptr())->param_groups().empty());
  }
}

}  // namespace
}  // namespace cohort::train
