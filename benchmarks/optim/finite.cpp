// What it costs to look at gradients before each step: the whole training step (forward, loss, backward,
// update) with and without, turn by turn in one process, on one thread.
//   A multilayer perceptron 784-128-10 at 32 samples, and a small convolutional net at 16 images of 32 x 32.
// Run: OMP_NUM_THREADS=1 optim_finite [rounds=60]
#include "cohort/optim/finite.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/sgd.h"

namespace {

namespace bench = cohort::bench;
namespace nn = torch::nn;
namespace optim = cohort::optim;

using Groups = std::vector<optim::ParamGroup>;

void run(const char* name, nn::Sequential net, const at::Tensor& input, int rounds) {
  const at::Tensor target = at::randint(0, 10, {input.size(0)}, at::kLong);
  optim::SGD sgd(net->parameters(), optim::SGDOptions(1e-4).momentum(0.9));
  const auto step = [&](const std::function<void()>& update) {
    return [&, update] {
      sgd.zero_grad();
      at::cross_entropy_loss(net->forward(input), target).backward();
      update();
    };
  };
  const Groups& groups = sgd.param_groups();
  const auto measure = [&](std::vector<bench::Variant> variants) {
    const auto options = bench::TimeitOptions().rounds(rounds);
    std::printf("%s\n%s\n", name,
                bench::compare(variants, bench::CompareOptions().timeit(options)).text().c_str());
  };
  measure({{"step", step([&] { sgd.step(); })},
           {"find, step", step([&] { sgd.step_unless(optim::find_non_finite(groups)); })}});
  measure({{"clip, step", step([&] {
              optim::clip_grad_norm_(groups, 1.0);
              sgd.step();
            })},
           {"clip and find, step",
            step([&] { sgd.step_unless(optim::clip_grad_norm_unless_non_finite_(groups, 1.0)); })}});
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  cohort::memory::tune_allocator();
  at::set_num_threads(1);
  at::manual_seed(1);
  run("mlp", nn::Sequential(nn::Linear(784, 128), nn::ReLU(), nn::Linear(128, 10)), at::rand({32, 784}),
      rounds);
  run("convolutions",
      nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)), nn::ReLU(),
                     nn::MaxPool2d(nn::MaxPool2dOptions(2)),
                     nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)), nn::ReLU(),
                     nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)), nn::Flatten(),
                     nn::Linear(64, 10)),
      at::rand({16, 3, 32, 32}), rounds);
}
