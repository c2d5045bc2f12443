#include "cohort/train/classification.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "cohort/base/error.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/trainer.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

namespace nn = torch::nn;

data::Loader loader_of(std::vector<at::Tensor> tensors) {
  return data::Loader(std::make_shared<data::TensorDataset>(std::move(tensors)), {.batch_size = 4});
}

class ClassificationTaskTest : public ::testing::TestWithParam<bool> {
 protected:
  /// A classifier whose output is [N, 3, ...]: with segmentation's targets LibTorch computes a loss of it.
  ClassificationTaskTest()
      : net_(nn::Conv2d(nn::Conv2dOptions(1, 3, 1))),
        task_(net_.ptr(), std::make_shared<optim::SGD>(net_->parameters(), optim::SGDOptions(0.1)), nullptr,
              ClassificationOptions().script(GetParam())) {}

  void train(std::vector<at::Tensor> tensors) {
    data::Loader loader = loader_of(std::move(tensors));
    Trainer(TrainerOptions().max_steps(1)).fit(task_, loader);
  }
  void evaluate(std::vector<at::Tensor> tensors) {
    data::Loader loader = loader_of(std::move(tensors));
    Trainer(TrainerOptions()).evaluate(task_, loader);
  }

  nn::Sequential net_;
  ClassificationTask task_;
};

TEST_P(ClassificationTaskTest, TargetsThatAreNoClassesAreRejectedInTrainingAndEvaluation) {
  const at::Tensor images = at::zeros({8, 1, 2, 2});
  const std::vector<std::pair<at::Tensor, const char*>> targets = {
      {at::zeros({8, 2, 2}, at::kLong), "are Long [4, 2, 2]"},  // segmentation
      {at::zeros({8, 3, 2, 2}), "are Float [4, 3, 2, 2]"},      // probabilities
      {at::zeros({8}), "are Float [4]"},                        // regression
      {at::zeros({8}, at::kInt), "are Int [4]"},
      {at::zeros({8, 1}, at::kLong), "are Long [4, 1]"},
  };
  for (const auto& [target, text] : targets) {
    COHORT_EXPECT_THROW_WITH(train({images, target}), DataError, text);
    COHORT_EXPECT_THROW_WITH(evaluate({images, target}), DataError, text);
  }
  COHORT_EXPECT_THROW_WITH(train({images}), DataError, "no target");
}

TEST_P(ClassificationTaskTest, WhatLibTorchRejectsComesWithTheBatchThatItWas) {
  const at::Tensor target = at::zeros({8}, at::kLong);
  COHORT_EXPECT_THROW_WITH(train({at::zeros({8, 1, 2, 2}, at::kByte), target}), DataError,
                           "training on a batch of inputs Byte [4, 1, 2, 2] and targets Long [4]");
  COHORT_EXPECT_THROW_WITH(evaluate({at::zeros({8, 2, 2, 2}), target}), DataError,
                           "evaluation on a batch of inputs Float [4, 2, 2, 2] and targets Long [4]");
  // The model's output is a map of classes, and the target one class.
  COHORT_EXPECT_THROW_WITH(train({at::zeros({8, 1, 2, 2}), target}), DataError, "inputs Float [4, 1, 2, 2]");
}

TEST_P(ClassificationTaskTest, AClassOutOfRangeIsNamedWithItsBatch) {
  nn::Sequential net(nn::Flatten(), nn::Linear(4, 3));
  ClassificationTask task(net.ptr(), std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1)),
                          nullptr, ClassificationOptions().script(GetParam()));
  data::Loader loader = loader_of({at::zeros({8, 2, 2}), at::full({8}, 3, at::kLong)});
  COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions().max_steps(1)).fit(task, loader), DataError,
                           "targets Long [4]: Target 3 is out of bounds");
}

INSTANTIATE_TEST_SUITE_P(Script, ClassificationTaskTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "on" : "off"; });

}  // namespace
}  // namespace cohort::train
