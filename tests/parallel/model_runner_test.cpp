#include "cohort/parallel/model_runner.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

COHORT_REGISTER_MODEL_RUNNER("twice", {.make =
                                           [](torch::nn::AnyModule model, const ModelRunnerOptions&) {
                                             return ModelRunner{[model](const at::Tensor& x) mutable {
                                               return 2 * model.forward<at::Tensor>(x);
                                             }};
                                           },
                                       .gradients = "average",
                                       .has_own_threads = true});

TEST(ModelRunnerTest, PlainCallsTheModelAndARegisteredRunnerDoesAsItLikes) {
  const torch::nn::AnyModule model(torch::nn::Linear(3, 2));
  const at::Tensor input = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor plain = make_model_runner(model, {}).forward(input);
  EXPECT_TRUE(at::equal(plain, torch::nn::AnyModule(model).forward(input)));
  EXPECT_TRUE(at::equal(make_model_runner(model, {.name = "twice"}).forward(input), 2 * plain));
  EXPECT_EQ(model_runner_type("twice").gradients, "average");
  EXPECT_FALSE(model_runner_type("plain").has_own_threads);
}

TEST(ModelRunnerTest, UnknownAndIncompleteRunnersAreErrors) {
  COHORT_EXPECT_THROW_WITH(model_runner_type("plan"), UsageError,
                           "there is no model runner 'plan'. Try: plain; ");
  COHORT_EXPECT_THROW_WITH(register_model_runner("empty", {}), UsageError, "a model runner needs make");
  register_model_runner("without_forward", {.make = [](torch::nn::AnyModule, const ModelRunnerOptions&) {
                          return ModelRunner{};
                        }});
  COHORT_EXPECT_THROW_WITH(
      make_model_runner(torch::nn::AnyModule(torch::nn::Linear(1, 1)), {.name = "without_forward"}),
      UsageError, "was made without forward");
}

}  // namespace
}  // namespace cohort::parallel
