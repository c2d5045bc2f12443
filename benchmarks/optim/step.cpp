// An optimizer's step beside torch::optim's, turn by turn in one process, on one thread:
//   ResNet-18's 62 parameters (11.69 million floats), and 60 tensors of 1,000 floats.
// Run: OMP_NUM_THREADS=1 optim_step [rounds=60]; the Python peer is step.py.
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/core/allocator.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/sgd.h"

namespace {

using Tensors = std::vector<at::Tensor>;
namespace bench = cohort::bench;
namespace optim = cohort::optim;

std::vector<std::vector<std::int64_t>> resnet18() {
  std::vector<std::vector<std::int64_t>> shapes = {{64, 3, 7, 7}, {64}, {64}};
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

Tensors parameters(const std::vector<std::vector<std::int64_t>>& shapes) {
  Tensors result;
  for (const auto& shape : shapes) {
    result.push_back(at::randn(shape).set_requires_grad(true));
    result.back().mutable_grad() = at::randn(shape).mul_(1e-3);
  }
  return result;
}

// Each turn a few calls of theirs and of ours. The second figure of a row says how many times as fast ours
// is.
void compare(const char* what, int rounds, int calls, const std::function<void()>& ours,
             const std::function<void()>& theirs) {
  const bench::Comparison figures =
      bench::compare({{"torch::optim", [&](const bench::Shape&) { return theirs; }},
                      {"cohort", [&](const bench::Shape&) { return ours; }}},
                     bench::CompareOptions().timeit(bench::TimeitOptions().rounds(rounds).calls(calls)));
  const auto microseconds = [&](std::size_t row, double part) {
    return 1e6 * figures.rows[row].measurement.percentile(part);
  };
  std::printf("%-28s %9.1f %9.1f %9.1f | %9.1f %9.1f %9.1f | %6.2fx\n", what, microseconds(1, 0),
              microseconds(1, 0.5), microseconds(1, 0.99), microseconds(0, 0), microseconds(0, 0.5),
              microseconds(0, 0.99), figures.rows[1].ratio);
}

void run(const std::string& name, const std::vector<std::vector<std::int64_t>>& shapes, int rounds,
         int calls) {
  Tensors p = parameters(shapes), q = parameters(shapes);
  {
    optim::SGD ours(p, optim::SGDOptions(1e-3).momentum(0.9));
    torch::optim::SGD theirs(q, torch::optim::SGDOptions(1e-3).momentum(0.9));
    compare((name + " SGD 0.9").c_str(), rounds, calls, [&] { ours.step(); }, [&] { theirs.step(); });
  }
  {
    optim::Adam ours(p);
    torch::optim::Adam theirs(q);
    compare((name + " Adam").c_str(), rounds, calls, [&] { ours.step(); }, [&] { theirs.step(); });
  }
  {
    optim::AdamW ours(p);
    torch::optim::AdamW theirs(q);
    compare((name + " AdamW").c_str(), rounds, calls, [&] { ours.step(); }, [&] { theirs.step(); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  if (argc > 2) cohort::core::tune_allocator();
  at::set_num_threads(1);
  std::printf("us per step, 1 thread, %d rounds, allocator %s\n%-28s %29s | %29s | ratio\n", rounds,
              argc > 2 ? "tuned" : "as it comes", "", "cohort min median p99", "torch::optim min median p99");
  run("ResNet-18", resnet18(), rounds,
      5);  // several: the first of a turn writes back what the other left in cache
  run("60 x 1000", std::vector<std::vector<std::int64_t>>(60, {1000}), rounds, 200);
}
