// What recomputation saves and costs: one step of a deep MLP, plain and with core::checkpoint around parts of
// it, in one process, in turn. Prints the most bytes of tensors alive at once (parameters and their
// gradients, which all have, left out) and the time of a step. Run: OMP_NUM_THREADS=1 core_recompute [layers
// width batch rounds]
#include "cohort/core/recompute.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cohort/core/live_bytes.h"

namespace {

namespace nn = torch::nn;

struct Way {
  const char* name;
  std::int64_t part;  // layers in each recomputed part; 0: none is
  std::vector<double> seconds = {};
  std::int64_t peak = 0;
};

void step(std::vector<nn::Sequential>& layers, std::int64_t part, const at::Tensor& input) {
  at::Tensor x = input;
  const auto count = static_cast<std::int64_t>(layers.size());
  for (std::int64_t begin = 0; begin < count; begin += std::max<std::int64_t>(part, 1)) {
    const auto run = [&layers, begin,
                      end = std::min(count, begin + std::max<std::int64_t>(part, 1))](at::Tensor t) {
      for (std::int64_t i = begin; i < end; ++i) t = layers[static_cast<std::size_t>(i)]->forward(t);
      return t;
    };
    x = part > 0 ? cohort::core::checkpoint(run, x) : run(x);
  }
  x.sum().backward();
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::atoll(argv[index]) : otherwise;
  };
  const std::int64_t depth = argument(1, 64), width = argument(2, 256), batch = argument(3, 512);
  const std::int64_t rounds = argument(4, 21);
  std::vector<nn::Sequential> layers;
  for (std::int64_t i = 0; i < depth; ++i)
    layers.emplace_back(nn::Sequential(nn::Linear(width, width), nn::Tanh()));
  const at::Tensor input = at::ones({batch, width});
  std::vector<Way> ways{{"plain", 0}, {"parts of 4", 4}, {"parts of 8", 8}, {"parts of 16", 16}};
  step(layers, 0, input);  // makes the gradients
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (Way& way : ways) {
      const cohort::core::LiveBytes bytes;
      const auto begin = std::chrono::steady_clock::now();
      step(layers, way.part, input);
      way.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      way.peak = bytes.peak();
    }
  }
  std::printf("%ld layers of %ld, batch %ld, %ld rounds\n%-12s %10s %7s %9s %9s %9s %7s\n", depth, width,
              batch, rounds, "", "peak MiB", "ratio", "min ms", "median", "p99", "ratio");
  for (Way& way : ways) {
    std::sort(way.seconds.begin(), way.seconds.end());
    const auto at = [&](double share) {
      return way.seconds[static_cast<std::size_t>(share * static_cast<double>(rounds - 1))] * 1e3;
    };
    std::printf("%-12s %10.1f %7.2f %9.1f %9.1f %9.1f %7.2f\n", way.name,
                static_cast<double>(way.peak) / (1 << 20),
                static_cast<double>(way.peak) / static_cast<double>(ways[0].peak), at(0), at(0.5), at(0.99),
                at(0) / (ways[0].seconds[0] * 1e3));
  }
}
