// An optimizer's step beside torch::optim's, turn by turn in one process, on one thread:
//   ResNet-18's 62 parameters (11.69 million floats), and 60 tensors of 1,000 floats.
// Run: OMP_NUM_THREADS=1 optim_step [rounds=60]; the PyTorch peer is step.py.
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using Shapes = std::vector<std::vector<std::int64_t>>;
namespace bench = cohort::bench;
namespace optim = cohort::optim;

Shapes resnet18() {
  Shapes shapes = {{64, 3, 7, 7}, {64}, {64}};
  std::int64_t in = 64;
  for (std::int64_t out : {64, 128, 256, 512}) {
    for (int block = 0; block < 2; ++block) {
      shapes.insert(shapes.end(), {{out, in, 3, 3}, {out}, {out}, {out, out, 3, 3}, {out}, {out}});
      if (in != out) shapes.insert(shapes.end(), {{out, in, 1, 1}, {out}, {out}});
      in = out;
    }
  }
  shapes.insert(shapes.end(), {{1000, 512}, {1000}});
  return shapes;
}

Tensors parameters(const Shapes& shapes) {
  Tensors result;
  for (const auto& shape : shapes) {
    result.push_back(at::randn(shape).set_requires_grad(true));
    result.back().mutable_grad() = at::randn(shape).mul_(1e-3);
  }
  return result;
}

template <typename Ours, typename Theirs>
void compare(const std::string& name, Ours&& ours, Theirs&& theirs, const bench::TimeitOptions& options) {
  const auto figures =
      bench::compare({{"torch::optim", [&] { theirs.step(); }}, {"cohort", [&] { ours.step(); }}},
                     bench::CompareOptions().timeit(options));
  std::printf("%s\n%s\n", name.c_str(), figures.text().c_str());
}

void run(const std::string& name, const Shapes& shapes, const bench::TimeitOptions& options) {
  Tensors p = parameters(shapes), q = parameters(shapes);
  compare(name + ", SGD 0.9", optim::SGD(p, optim::SGDOptions(1e-3).momentum(0.9)),
          torch::optim::SGD(q, torch::optim::SGDOptions(1e-3).momentum(0.9)), options);
  compare(name + ", Adam", optim::Adam(p), torch::optim::Adam(q), options);
  compare(name + ", AdamW", optim::AdamW(p), torch::optim::AdamW(q), options);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  if (argc > 2) cohort::memory::tune_allocator();
  at::set_num_threads(1);
  std::printf("a step, %d rounds, allocator %s\n\n", rounds, argc > 2 ? "tuned" : "as it comes");
  const auto options = bench::TimeitOptions().rounds(rounds);
  // Several calls: the first of a turn writes back what the other left in cache.
  run("ResNet-18", resnet18(), bench::TimeitOptions(options).calls(5));
  run("60 tensors of 1000", Shapes(60, {1000}), bench::TimeitOptions(options).calls(200));
}
