// What recomputation saves and costs: one step of a deep MLP, plain and with autograd::recompute around parts
// of it, in one process, in turn. Prints the time of a step and the most bytes of tensors alive at once
// (parameters and their gradients, which all have, left out). Run: OMP_NUM_THREADS=1 autograd_recompute
// [layers width batch rounds]
#include "cohort/autograd/recompute.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/memory/internal/live_bytes.h"

namespace {

namespace bench = cohort::bench;
namespace nn = torch::nn;

void step(std::vector<nn::Sequential>& layers, std::int64_t part, const at::Tensor& input) {
  at::Tensor x = input;
  const auto count = static_cast<std::int64_t>(layers.size());
  for (std::int64_t begin = 0; begin < count; begin += std::max<std::int64_t>(part, 1)) {
    const auto run = [&layers, begin,
                      end = std::min(count, begin + std::max<std::int64_t>(part, 1))](at::Tensor t) {
      for (std::int64_t i = begin; i < end; ++i) t = layers[static_cast<std::size_t>(i)]->forward(t);
      return t;
    };
    x = part > 0 ? cohort::autograd::recompute(run, x) : run(x);
  }
  x.sum().backward();
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::atoll(argv[index]) : otherwise;
  };
  const std::int64_t depth = argument(1, 64), width = argument(2, 256), batch = argument(3, 512);
  std::vector<nn::Sequential> layers;
  for (std::int64_t i = 0; i < depth; ++i)
    layers.emplace_back(nn::Sequential(nn::Linear(width, width), nn::Tanh()));
  const at::Tensor input = at::ones({batch, width});
  step(layers, 0, input);  // makes the gradients
  std::map<std::string, std::int64_t> peaks;
  std::vector<bench::Variant> ways;
  for (const std::int64_t part : {0, 4, 8, 16}) {
    const std::string name = part == 0 ? "plain" : "parts of " + std::to_string(part);
    ways.emplace_back(name, [&, name, part] {
      const cohort::memory::LiveBytes bytes;
      step(layers, part, input);
      peaks[name] = bytes.peak();
    });
  }
  const auto figures =
      bench::compare(ways, bench::CompareOptions().timeit(
                               bench::TimeitOptions().calls(1).rounds(static_cast<int>(argument(4, 21)))));
  std::printf("%ld layers of %ld, batch %ld\n\n%s\n", depth, width, batch, figures.text().c_str());
  for (const bench::Variant& way : ways) {
    const auto peak = static_cast<double>(peaks[way.name]);
    std::printf("%-12s peak %8.1f MiB, ratio %.2f\n", way.name.c_str(), peak / (1 << 20),
                peak / static_cast<double>(peaks["plain"]));
  }
}
