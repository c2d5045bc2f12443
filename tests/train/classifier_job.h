#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <vector>

#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "cohort/train/trainer.h"

/// A small classifier, for tests of the trainer.
namespace cohort::test {

inline constexpr std::int64_t kSamples = 40;
inline constexpr std::int64_t kBatch = 8;  // five steps an epoch

inline std::shared_ptr<data::Dataset> make_data() {
  at::manual_seed(7);
  const at::Tensor input = at::randn({kSamples, 6});
  return std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, input.argmax(1)});
}

inline data::Loader make_loader(int workers = 0, bool shuffle = true) {
  return data::Loader(make_data(), {.batch_size = kBatch, .workers = workers, .shuffle = shuffle, .seed = 5});
}

/// A classifier with dropout, so that the generator's state matters, and with momentum and a schedule.
struct ClassifierJob {
  explicit ClassifierJob(train::ClassificationOptions options = {}) {
    at::manual_seed(3);
    net = torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
                                torch::nn::Dropout(0.5), torch::nn::Linear(16, 6));
    optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1).momentum(0.9));
    task = std::make_unique<train::ClassificationTask>(net.ptr(), optimizer, optim::cosine(15), options);
  }

  torch::nn::Sequential net{nullptr};
  std::shared_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<train::ClassificationTask> task;
};

inline ::testing::AssertionResult same_parameters(const torch::nn::Sequential& a,
                                                  const torch::nn::Sequential& b) {
  const auto left = a->named_parameters();
  for (const auto& entry : b->named_parameters()) {
    if (!at::equal(left[entry.key()], entry.value()))
      return ::testing::AssertionFailure() << entry.key() << " differs";
  }
  const auto buffers = a->named_buffers();
  for (const auto& entry : b->named_buffers()) {
    if (!at::equal(buffers[entry.key()], entry.value())) {
      return ::testing::AssertionFailure() << entry.key() << " differs";
    }
  }
  return ::testing::AssertionSuccess();
}

inline train::TrainerOptions three_epochs() {
  return train::TrainerOptions().epochs(3).seed(11).save_every(1);
}

}  // namespace cohort::test
