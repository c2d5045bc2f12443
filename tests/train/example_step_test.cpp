#include "cohort/train/example_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/config/config.h"
#include "tests/support/header_examples.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

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

ExampleStepOptions options_of(const config::Config& config) {
  return {.model = config.model,
          .data = config.data,
          .optim = config.optim,
          .distributed = config.distributed,
          .train = config.train,
          .seed = config.run.seed,
          .plan = batch_plan(config.train, config.distributed, config.data, 1)};
}

TEST(ExampleStepTest, ABatchIsZerosOfTheDatasFields) {
  const ExampleStep step(options_of(mlp_config()));
  EXPECT_EQ(step.input(3).size(0), 3);
  EXPECT_EQ(step.target(3).size(0), 3);
  EXPECT_EQ(step.batch_bytes(3), std::int64_t(step.input(3).nbytes() + step.target(3).nbytes()));
  EXPECT_EQ(step.runner_options().batch_size, 8);
  EXPECT_EQ(step.runner_options().name, "plain");
}

// clang-format off
std::vector<at::Tensor> gradients_of_example(const ExampleStepOptions& options) {
  const train::ExampleStep step(options);
  auto model = step.make_model();
  const auto runner = parallel::make_model_runner(model, step.runner_options());
  step.run(runner, step.input(8), step.target(8));

  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model.ptr()->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}
// clang-format on

TEST(ExampleStepTest, TheExampleOfTheHeaderMakesGradients) {
  const std::string here = test::read_file(test::source_dir() / "tests/train/example_step_test.cpp");
  const std::vector<std::string> lines = test::example_of("train/example_step.h");
  EXPECT_EQ(lines.size(), 4U);
  EXPECT_EQ(test::first_missing(lines, here), "");
  const auto gradients = gradients_of_example(options_of(mlp_config()));
  EXPECT_FALSE(gradients.empty());
  for (const at::Tensor& gradient : gradients) EXPECT_TRUE(gradient.defined());
}

TEST(ExampleStepTest, TheStepLeavesTheGradientsOfTheRunnersModel) {
  for (const char* precision : {"f32", "bf16"}) {
    SCOPED_TRACE(precision);
    const ExampleStep step(options_of(mlp_config({base::concat("train.precision=", precision)})));
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
