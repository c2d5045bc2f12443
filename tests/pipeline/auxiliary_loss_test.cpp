// A stage's own loss beside that of the outputs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <memory>

#include "cohort/base/error.h"
#include "cohort/pipeline/pipeline.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

// A mixture of experts: the last stage keeps a loss of its own for the loss function, with its graph. Both
// may come from something that the stage has computed, which a backward frees.
void expect_auxiliary_loss_as_in_the_loop(bool has_norm, Schedule schedule) {
  torch::manual_seed(3);
  torch::nn::Linear first(4, 4), last(4, 4), router(4, 2);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
  const auto auxiliary = std::make_shared<at::Tensor>();
  Tensors parameters = last->parameters();
  for (const at::Tensor& parameter : router->parameters()) parameters.push_back(parameter);
  for (const at::Tensor& parameter : norm->parameters()) parameters.push_back(parameter);
  const Stage stage(
      [=](const Tensors& in) mutable {
        const at::Tensor hidden = has_norm ? norm->forward(in[0]) : in[0];
        *auxiliary = router->forward(hidden).softmax(1).square().mean();
        return Tensors{last->forward(hidden)};
      },
      parameters);
  const auto loss = [auxiliary](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean() + *auxiliary;
  };
  const at::Tensor x = torch::randn({8, 4}), y = torch::randn({8, 4});
  Tensors all{first->weight, router->weight, last->weight};
  if (has_norm) all.push_back(norm->weight);
  for (int m = 0; m < 2; ++m) {
    const at::Tensor hidden = first->forward(x.narrow(0, 4 * m, 4));
    (loss(stage.forward({hidden}, 0, 1).at(0), y.narrow(0, 4 * m, 4)) * 0.5).backward();
  }
  Tensors expected;
  for (const at::Tensor& parameter : all) {
    expected.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }
  PipelineOptions options;
  options.placements = base::parse_placements("cpu:0/a,cpu:0/b");
  options.num_micro_batches = 2;
  options.schedule = schedule;
  Pipeline pipe({first, stage}, options);
  if (schedule == Schedule::kZeroBubble) {
    COHORT_EXPECT_THROW_WITH(pipe.step(x, y, loss), StageError, "of which a tensor was kept with its graph");
    return;
  }
  pipe.step(x, y, loss);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(at::allclose(all[i].grad(), expected[i], 1e-6, 1e-7)) << i;
  }
}

TEST(AuxiliaryLossTest, AStageMayKeepOneOfItsMicroBatch) {
  for (const bool has_norm : {false, true}) {
    for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
      expect_auxiliary_loss_as_in_the_loop(has_norm, schedule);
    }
  }
}

}  // namespace
}  // namespace cohort::pipeline
