// DistributedDataParallel beside PyTorch's: the same initial values, samples, kernels and threads.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/optim/sgd.h>

#include <filesystem>

#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/parallel/distributed.h"
#include "tests/parallel/nets.h"
#include "tests/support/processes/python.h"
#include "tests/support/ranks.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;

constexpr int kSteps = 50, kRanks = 2, kSamples = 6;  // samples of one rank

nn::Sequential make_conv_net() {
  return test::seeded(5, [] {
    return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                          nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(8, 16, 3).padding(1)),
                          nn::BatchNorm2d(16), nn::ReLU(), nn::AdaptiveAvgPool2d(1), nn::Flatten(),
                          nn::Linear(16, 10));
  });
}

// PyTorch makes this net, takes initial values and samples from `folder`, trains on two ranks over Gloo, and
// compares with what we made of them: every bit of parameters, running statistics and losses.
TEST(PyTorchDdpTest, TwoRanksEndWithTheBitsOfPyTorch) {
  COHORT_NEED_PYTHON();
  const test::TempDir folder;
  const auto [inputs, targets] = test::seeded(7, [] {
    return std::pair(at::randn({kSteps, kRanks, kSamples, 3, 12, 12}),
                     at::randint(10, {kSteps, kRanks, kSamples}, at::kLong));
  });
  checkpoint::save_safetensors(folder / "start.safetensors", checkpoint::module_state(*make_conv_net()));
  checkpoint::save_safetensors(folder / "samples.safetensors", {{"inputs", inputs}, {"targets", targets}});

  test::run_ranks(kRanks, "gloo", [&](comm::Group& group) {
    DistributedDataParallel<nn::Sequential> model(make_conv_net(), group);
    torch::optim::SGD optimizer(model->parameters(),
                                torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
    at::Tensor losses = at::empty({kSteps});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = at::cross_entropy_loss(model.forward(inputs[step][group.rank()].clone()),
                                                     targets[step][group.rank()]);
      loss.backward();
      optimizer.step();
      losses[step] = loss.detach();
    }
    auto state = checkpoint::module_state(*model.module());
    state.emplace_back("losses", losses);
    checkpoint::save_safetensors(folder / base::concat("rank", group.rank(), ".safetensors"), state);
  });
  const auto script = test::source_dir() / "tests/parallel/ddp/train_ddp.py";
  EXPECT_EQ(test::run_python({script, folder.path()}), 0);
}

}  // namespace
}  // namespace cohort::parallel
