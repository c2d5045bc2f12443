// Script mode beside eager mode, turn by turn in one process, on one thread: a loop from courses, training
// steps of small models with our fused optimizer and with torch::optim's; what guards and calls cost, what
// memory a step takes, and what recording takes. Its PyTorch peer is replay.py.
// Run: OMP_NUM_THREADS=1 script_replay [rounds=15] [tuned]; `tuned` raises the allocator's thresholds first.
#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cohort/memory/allocation_profiler.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/resnet.h"
#include "cohort/script/internal/record/guard.h"
#include "steps.h"

namespace {

using namespace cohort::benchmarks;
namespace bench = cohort::bench;
namespace core = cohort::core;
namespace memory = cohort::memory;
namespace optim = cohort::optim;
namespace script = cohort::script;
int rounds = 15;

// The most that tensors take in a step, with parameters and the optimizer's state.
std::int64_t peak_bytes(const std::function<Body()>& make) {
  memory::AllocationProfiler profiler;
  const Body body = make();
  for (int warm = 0; warm < 9; ++warm) body();  // calls 10 to 12: none is verified
  profiler.begin();
  for (int step = 0; step < 3; ++step) body();
  return profiler.total().peak;
}

void print_memory(const char* what, const MakeNet& make, const at::Tensor& x, const at::Tensor& y) {
  std::int64_t standing = 0;
  {
    const memory::AllocationProfiler profiler;
    auto model = make();
    standing = profiler.total().now;
  }
  standing *= 2;  // parameters and momentum
  std::printf("%-24s", what);
  double eager = 0;
  for (const Way way : {Way::kEager, Way::kStep, Way::kFunction}) {
    const auto peak =
        static_cast<double>(peak_bytes(training<optim::SGD>(make, x, y, way)) - standing) / 1024;
    if (way == Way::kEager) eager = peak;
    std::printf("  %10.0f (%.2f)", peak, peak / eager);
  }
  std::printf("\n");
}

at::Tensor lecture(at::Tensor x) {
  for (int i = 0; i < 10; ++i) x = x * x;
  return x;
}

template <typename Fn>
std::vector<BenchmarkCase> both(const Fn& fn, const at::Tensor& x) {
  return {{"eager", [=] { return [=] { bench::keep(fn(x)); }; }},
          {"script", [=] { return [=, fast = script::script(fn)]() mutable { bench::keep(fast(x)); }; }}};
}

void calls() {
  const at::NoGradGuard no_grad;
  compare("ten times x = x * x, 5 floats", both(&lecture, at::rand({5})), rounds);
  compare("one x * x, 5 floats: what a call costs",
          both([](const at::Tensor& x) { return x * x; }, at::rand({5})), rounds);
  script::Tensors inputs;
  for (int i = 0; i < 16; ++i) inputs.push_back(at::rand({4, 8}));
  const script::InputGuard guard(inputs);
  std::printf("%s\n\n", bench::timeit([&] { return guard.holds(inputs); },
                                      bench::TimeitOptions().label("guards of 16 tensors").rounds(rounds))
                            .to_text()
                            .c_str());
}

double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The first two calls are eager steps that are watched, the third is the warm-up.
void recording() {
  at::manual_seed(1);
  cohort::models::ModelOptions options;
  options.name = "resnet50";
  const MakeNet make = [options] { return AnyNet(cohort::models::ResNet(options)); };
  const at::Tensor x = at::randn({4, 3, 64, 64}), y = at::randint(0, 10, {4});
  const Body eager = training<optim::SGD>(make, x, y, Way::kEager)();
  for (int warm = 0; warm < 2; ++warm) eager();
  std::vector<double> plain, beyond, warm_up;
  for (int round = 0; round < 5; ++round) {
    const Body step = training<optim::SGD>(make, x, y, Way::kStep)();
    plain.push_back(seconds_of(eager));
    const double two = seconds_of(step) + seconds_of(step);
    beyond.push_back(two - 2 * plain.back());
    warm_up.push_back(seconds_of(step) - plain.back());
  }
  for (auto* figures : {&plain, &beyond, &warm_up}) std::sort(figures->begin(), figures->end());
  std::printf(
      "ResNet-50, batch 4 of 64 x 64: an eager step %.3f s; beyond it two recordings with planning take "
      "%.3f s, the warm-up %.3f s (medians of 5)\n\n",
      plain[2], beyond[2], warm_up[2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) rounds = std::atoi(argv[1]);
  if (argc > 2) memory::tune_allocator();
  at::set_num_threads(1);
  at::manual_seed(1);
  calls();
  const MakeNet mlp = [] { return AnyNet(cohort::test::small_mlp()); };
  const MakeNet wide = [] { return AnyNet(cohort::test::small_mlp(512)); };
  const MakeNet encoder = [] { return AnyNet(cohort::test::Encoder(64)); };
  const MakeNet conv = [] { return AnyNet(cohort::test::small_conv_net()); };
  const MakeNet tagger = [] { return AnyNet(cohort::test::Tagger()); };
  const at::Tensor x16 = at::randn({16, 32}), y16 = at::randint(0, 10, {16});
  const at::Tensor x128 = at::randn({128, 32}), y128 = at::randint(0, 10, {128});
  const at::Tensor sequence = at::randn({6, 4, 64}), y24 = at::randint(0, 10, {24});
  const at::Tensor images = at::randn({8, 3, 16, 16}), y8 = at::randint(0, 10, {8});
  const at::Tensor tokens = at::randint(0, 50, {4, 12});
  steps("MLP 64, batch 16", mlp, x16, y16, rounds);
  steps("MLP 512, batch 128", wide, x128, y128, rounds);
  steps("transformer layer 64", encoder, sequence, y24, rounds);
  steps("conv net, batch 8", conv, images, y8, rounds);
  steps("LSTM 2 x 32", tagger, tokens, tokens.view(-1), rounds);
  recording();
  std::printf(
      "most memory in a step beyond parameters and momentum, KiB (ratio to eager)\n%-24s  %17s  %17s  %17s\n",
      "", "eager", "script_step", "script(model)");
  print_memory("MLP 64, batch 16", mlp, x16, y16);
  print_memory("MLP 512, batch 128", wide, x128, y128);
  print_memory("transformer layer 64", encoder, sequence, y24);
  print_memory("conv net, batch 8", conv, images, y8);
  print_memory("LSTM 2 x 32", tagger, tokens, tokens.view(-1));
}
