// Training steps on a GPU, eager and scripted, turn by turn in one process: an MLP's, where launching kernels
// is what takes time, and ResNet-18's. On a GPU the host gives work ahead, so a step is as long as the slower
// of the two. Run: script_replay_device [device=cuda] [rounds=7]
#include <cstdlib>

#include "cohort/core/device.h"
#include "cohort/models/resnet.h"
#include "steps.h"

int main(int argc, char** argv) {
  const auto resolved = cohort::core::resolve_device(argc > 1 ? argv[1] : "cuda");
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  const at::Device device = resolved.device;
  at::set_num_threads(1);
  at::manual_seed(1);
  std::printf("on %s (%s)\n\n", device.str().c_str(), resolved.reason.c_str());
  using cohort::benchmarks::AnyNet;
  const auto steps = [&](const std::string& what, const auto& make, const at::Tensor& x,
                         const at::Tensor& y) {
    const auto there = [=] {
      AnyNet net(make());
      net->to(device);
      return net;
    };
    cohort::benchmarks::steps(what, there, x.to(device), y.to(device), rounds);
  };
  steps(
      "MLP 64, batch 16", [] { return cohort::test::small_mlp(); }, at::randn({16, 32}),
      at::randint(0, 10, {16}));
  steps(
      "transformer layer 64", [] { return cohort::test::Encoder(64); }, at::randn({6, 4, 64}),
      at::randint(0, 10, {24}));
  const auto resnet = [] {
    cohort::models::ModelOptions options;
    options.name = "resnet18";
    return cohort::models::ResNet(options);
  };
  for (const std::int64_t batch : {8, 64}) {
    steps("ResNet-18, batch " + std::to_string(batch) + " of 224 x 224", resnet,
          at::randn({batch, 3, 224, 224}), at::randint(0, 10, {batch}));
  }
}
