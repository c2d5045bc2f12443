// How a batch comes to a GPU: the copy from pageable and from page-locked memory, and what it costs a
// training step when nothing overlaps, and when the loader copies the next batch meanwhile.
//
//   host_to_device_benchmark [--batch 256] [--size 224] [--steps 30] [--device cuda]
//
// Ends with status 77 where there is no GPU. Figures belong into docs/measurements/performance.md with the
// card's name.
#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cohort/bench/timeit.h"
#include "cohort/core/device.h"
#include "cohort/data/loader.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/sgd.h"

namespace {

namespace bench = cohort::bench;
namespace nn = torch::nn;

constexpr int kNoGpu = 77;

struct Arguments {
  std::int64_t batch = 256, size = 224, steps = 30;
  std::string device = "cuda";
};

/// Images in memory, so that reading costs a copy and no more.
std::shared_ptr<cohort::data::Dataset> images(const Arguments& arguments) {
  const std::int64_t count = 4 * arguments.batch;
  return std::make_shared<cohort::data::TensorDataset>(
      std::vector<at::Tensor>{at::rand({count, 3, arguments.size, arguments.size}), at::arange(count) % 10});
}

void measure_copy(const Arguments& arguments, at::Device device, bool pinned) {
  at::Tensor from = at::rand({arguments.batch, 3, arguments.size, arguments.size});
  if (pinned) from = from.pin_memory();
  at::Tensor to = at::empty_like(from, from.options().device(device).pinned_memory(false));
  const bench::Measurement copy =
      bench::timeit([&] { to.copy_(from, /*non_blocking=*/pinned); }, bench::TimeitOptions().warm_up(3));
  std::printf("copy %s  %s for %.1f MB: %.1f GB/s (spread %.0f %%)\n", pinned ? "page-locked" : "pageable   ",
              bench::to_text(copy.median()).c_str(), static_cast<double>(from.nbytes()) / 1e6,
              static_cast<double>(from.nbytes()) / copy.median() / 1e9, 100 * copy.spread());
}

/// A net whose step on the GPU takes about as long as its batch's copy.
nn::Sequential small_net() {
  nn::Sequential net;
  std::int64_t channels = 3;
  for (const std::int64_t next : {16, 32, 64}) {
    net->push_back(nn::Conv2d(nn::Conv2dOptions(channels, next, 3).stride(2).padding(1)));
    net->push_back(nn::ReLU());
    channels = next;
  }
  net->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(channels, 10));
  return net;
}

enum class Way { kNoInput, kInStep, kOverlapped };

double seconds_of_step(const Arguments& arguments, at::Device device, Way way, bool pinned) {
  torch::manual_seed(1);
  nn::Sequential net = small_net();
  net->to(device);
  cohort::optim::SGD optimizer(net->parameters(), cohort::optim::SGDOptions(0.01));
  cohort::data::LoaderOptions options{.batch_size = arguments.batch};
  options.workers = 4;
  options.pin_memory = pinned;
  if (way == Way::kOverlapped) options.device = device;
  cohort::data::Loader loader(images(arguments), options);

  std::vector<at::Tensor> held;  // the same batch again and again
  const auto step = [&] {
    std::vector<at::Tensor> fields = held;
    std::optional<cohort::data::Batch> batch;
    if (way != Way::kNoInput || held.empty()) {
      batch = loader.next();
      if (!batch) batch = loader.next();  // the next epoch
      for (const at::Tensor& field : batch->fields) fields.push_back(field.to(device));
      if (way == Way::kNoInput) held = fields;
    }
    optimizer.zero_grad();
    at::cross_entropy_loss(net->forward(fields[0]), fields[1]).backward();
    optimizer.step();
  };
  for (int i = 0; i < 5; ++i) step();
  return bench::seconds_of([&] {
           for (std::int64_t i = 0; i < arguments.steps; ++i) step();
         }) /
         static_cast<double>(arguments.steps);
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--device") {
      arguments.device = value;
    } else if (name == "--batch") {
      arguments.batch = std::atoll(value.c_str());
    } else if (name == "--size") {
      arguments.size = std::atoll(value.c_str());
    } else if (name == "--steps") {
      arguments.steps = std::atoll(value.c_str());
    } else {
      std::fprintf(stderr, "unknown option %s\n", name.c_str());
      std::exit(2);
    }
  }
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  const cohort::core::ResolvedDevice found = cohort::core::resolve_device("auto");
  if (found.device.is_cpu()) {
    std::fprintf(stderr, "nothing is measured: %s\n", found.reason.c_str());
    return kNoGpu;
  }
  const at::Device device(arguments.device);
  for (const bool pinned : {false, true}) measure_copy(arguments, device, pinned);
  const double alone = seconds_of_step(arguments, device, Way::kNoInput, false);
  std::printf("step without input             %s\n", bench::to_text(alone).c_str());
  for (const bool pinned : {false, true}) {
    for (const Way way : {Way::kInStep, Way::kOverlapped}) {
      const double seconds = seconds_of_step(arguments, device, way, pinned);
      std::printf("step, %s, %s  %s (%.2f of the step without input)\n",
                  pinned ? "page-locked" : "pageable   ",
                  way == Way::kOverlapped ? "overlapped" : "in the step", bench::to_text(seconds).c_str(),
                  seconds / alone);
    }
  }
  return 0;
}
