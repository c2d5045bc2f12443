// Images per second of the quick configuration's training step: forward, loss, backward, SGD, data in memory.
//
//   models_train_step [threads=1] [seconds per case=5] [tune=1]
//
// One line per case with min, median and p99 over steps; tune=0 leaves glibc's allocator alone.
// CPU time per step is that of all threads: the figure to compare on a
// machine that is shared. The Python peer is train_step.py, which takes the same arguments.
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
#include <ctime>
#include <vector>

#include "cohort/core/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/registry.h"

namespace {

using Clock = std::chrono::steady_clock;
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
  std::vector<double> rates, cpu;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (int step = 0; Clock::now() < end; ++step) {
    const auto start = Clock::now();
    const std::clock_t cpu_start = std::clock();
    at::Tensor loss;
    {
      const Bfloat16 autocast(which.bfloat16);
      loss = at::cross_entropy_loss(model.forward(images), targets);
    }
    loss.backward();
    sgd(parameters, momentum, step == 0);
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    if (step < 3) continue;
    rates.push_back(kBatch / elapsed.count());
    cpu.push_back(1e3 * static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
  }
  if (rates.empty()) return;
  std::sort(rates.begin(), rates.end());
  std::sort(cpu.begin(), cpu.end());
  const auto at_share = [&](double share) {
    return rates[static_cast<std::size_t>(share * (rates.size() - 1))];
  };
  std::printf(
      "cohort  %-22s images/s: min %6.0f  median %6.0f  p99 %6.0f  best %6.0f  cpu ms/step: min %6.2f  "
      "median %6.2f  (%zu steps)\n",
      which.name, rates.front(), at_share(0.5), at_share(0.99), rates.back(), cpu.front(),
      cpu[cpu.size() / 2], rates.size());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 5;
  if (argc <= 3 || std::atoi(argv[3]) != 0) cohort::core::tune_allocator();
  at::set_num_threads(threads);
  std::printf("vgg11_bn width 0.25, pools 4, head linear, 1 x 28 x 28, batch %ld, threads %d\n",
              static_cast<long>(kBatch), threads);
  for (const Case& which : {Case{"f32 contiguous", false, false}, Case{"f32 channels-last", true, false},
                            Case{"bf16 contiguous", false, true}, Case{"bf16 channels-last", true, true}}) {
    run(which, seconds);
  }
}
