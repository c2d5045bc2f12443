// Images per second of the quick configuration's training step: forward, loss, backward, SGD, data in memory.
//
//   models_train_step [threads=1] [seconds per case=5] [tune=1]
//
// One line per case with min, median and p99 over steps; tune=0 leaves glibc's allocator alone.
// CPU time per step is that of all threads: the figure to compare on a
// machine that is shared. The PyTorch peer is train_step.py, which takes the same arguments.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "cohort/bench/timeit.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/registry.h"

namespace {

namespace bench = cohort::bench;
constexpr std::int64_t kBatch = 128;

struct Case {
  const char* name;
  bool channels_last;
  bool bfloat16;
};

/// Autocast to bfloat16 for as long as it lives.
class Bfloat16 {
 public:
  explicit Bfloat16(bool on) : on_(on) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Bfloat16() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Bfloat16(const Bfloat16&) = delete;
  Bfloat16& operator=(const Bfloat16&) = delete;

 private:
  bool on_;
};

torch::nn::AnyModule make_quick() {
  cohort::models::ModelOptions options;
  options.name = "vgg11_bn";
  options.num_classes = 10;
  options.in_channels = 1;
  options.image_size = 28;
  options.width = 0.25;
  options.pools = 4;
  options.head = "linear";
  return cohort::models::make_model(options);
}

void sgd(std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& momentum, bool first) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  at::_fused_sgd_(parameters, gradients, momentum, 5e-4, 0.9, 0.01, 0.0, false, false, first);
  for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

void run(const Case& which, double seconds) {
  torch::manual_seed(1);
  torch::nn::AnyModule model = make_quick();
  const auto module = model.ptr();
  const at::MemoryFormat format =
      which.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  cohort::models::set_memory_format(*module, format);
  const at::Tensor images = at::rand({kBatch, 1, 28, 28}).contiguous(format);
  const at::Tensor targets = at::randint(10, {kBatch}, at::kLong);
  std::vector<at::Tensor> parameters = module->parameters();
  std::vector<at::Tensor> momentum;
  for (const at::Tensor& parameter : parameters) momentum.push_back(at::empty_like(parameter.detach()));
  bool is_first = true;
  const auto step = [&] {
    at::Tensor loss;
    {
      const Bfloat16 autocast(which.bfloat16);
      loss = at::cross_entropy_loss(model.forward(images), targets);
    }
    loss.backward();
    sgd(parameters, momentum, std::exchange(is_first, false));
  };
  for (int warm_up = 0; warm_up < 2; ++warm_up) step();
  const bench::Clock cpu_clock = bench::cpu_clock();
  std::vector<double> cpu;  // seconds of a step
  const auto steps = bench::sample(
      [&] {
        const auto begin = cpu_clock();
        const double wall = bench::seconds_of(step);
        cpu.push_back(std::chrono::duration<double>(cpu_clock() - begin).count());
        return wall;
      },
      bench::TimeitOptions().warm_up(0).rounds(
          std::max(1, static_cast<int>(seconds / bench::seconds_of(step)))));
  const auto rate = [&](double part) { return kBatch / steps.percentile(part); };
  std::printf(
      "cohort  %-22s images/s: min %6.0f  median %6.0f  p99 %6.0f  best %6.0f  cpu ms/step: min %6.2f  "
      "median %6.2f  (%zu steps)\n",
      which.name, rate(1), rate(0.5), rate(0.01), rate(0), 1e3 * bench::percentile(cpu, 0),
      1e3 * bench::percentile(cpu, 0.5), cpu.size());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 5;
  if (argc <= 3 || std::atoi(argv[3]) != 0) cohort::memory::tune_allocator();
  at::set_num_threads(threads);
  std::printf("vgg11_bn width 0.25, pools 4, head linear, 1 x 28 x 28, batch %ld, threads %d\n",
              static_cast<long>(kBatch), threads);
  for (const Case& which : {Case{"f32 contiguous", false, false}, Case{"f32 channels-last", true, false},
                            Case{"bf16 contiguous", false, true}, Case{"bf16 channels-last", true, true}}) {
    run(which, seconds);
  }
}
