#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "cohort/core/device.h"
#include "cohort/core/memory_watch.h"
#include "cohort/models/observer.h"
#include "cohort/train/memory_plan.h"

namespace cohort::train {
namespace {

constexpr std::int64_t kFew = 2, kMore = 4;  // one sample alone is none to batch norm

struct Probe {
  std::vector<std::pair<std::string, std::int64_t>> layers;
  std::vector<std::int64_t> curve;
};

Probe run_probe(const torch::nn::Module& module, const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                const at::Tensor& input) {
  Probe probe;
  const core::MemoryWatch watch;
  std::int64_t last = 0;
  const auto note = [&](const std::string& name) {
    const std::int64_t now = watch.total().now;
    probe.layers.emplace_back(name, now - last);
    last = now;
  };
  at::Tensor loss;
  {
    const models::LayerObserver observer(
        module, [&](const std::string& name, const torch::nn::Module& /*layer*/, const at::Tensor& /*input*/,
                    const at::Tensor& /*output*/) { note(name); });
    loss = loss_of(input);
  }
  note("");
  loss.backward();
  probe.curve = watch.curve();
  return probe;
}

MemoryLine line_through(std::int64_t few, std::int64_t more) {
  const double per_sample = double(more - few) / double(kMore - kFew);
  return {double(few) - double(kFew) * per_sample, per_sample};
}

// Note [Kernels of small batches]
// With one thread and fewer than 16 samples LibTorch runs some convolutions without oneDNN, with work space
// of another size. With two threads it takes the kernels that it takes for large batches.
class TwoThreads {
 public:
  TwoThreads() : before_(at::get_num_threads()) {
    if (before_ == 1) core::set_intra_op_threads(2, /*allow_more=*/true);
  }
  ~TwoThreads() {
    if (before_ == 1) core::set_intra_op_threads(1);
  }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

 private:
  int before_;
};

}  // namespace

std::int64_t MemoryLine::at(std::int64_t samples) const {
  return std::llround(fixed + per_sample * double(samples));
}

std::int64_t StepMemory::activations(std::int64_t samples) const {
  std::int64_t bytes = 0;
  for (const auto& [name, line] : layers) bytes += line.at(samples);
  return bytes;
}

std::int64_t StepMemory::peak(std::int64_t samples) const {
  std::int64_t most = 0;
  for (const MemoryLine& line : curve) most = std::max(most, line.at(samples));
  return most;
}

StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                      const std::function<at::Tensor(std::int64_t)>& input_of) {
  const TwoThreads threads;
  const auto drop_gradients = [&] {
    for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad().reset();
  };
  const auto probe = [&](std::int64_t samples) {
    drop_gradients();
    return run_probe(module, loss_of, input_of(samples));
  };
  probe(kFew);  // what LibTorch makes once
  const Probe few = probe(kFew), more = probe(kMore);
  drop_gradients();

  StepMemory memory;
  const bool same_layers = few.layers.size() == more.layers.size();
  for (std::size_t i = 0; same_layers && i < few.layers.size(); ++i) {
    memory.layers.emplace_back(few.layers[i].first,
                               line_through(few.layers[i].second, more.layers[i].second));
  }
  if (!same_layers) {
    std::int64_t kept_by_few = 0, kept_by_more = 0;
    for (const auto& [name, bytes] : few.layers) kept_by_few += bytes;
    for (const auto& [name, bytes] : more.layers) kept_by_more += bytes;
    memory.layers.emplace_back("", line_through(kept_by_few, kept_by_more));
  }
  if (few.curve.size() == more.curve.size()) {
    for (std::size_t i = 0; i < few.curve.size(); ++i) {
      memory.curve.push_back(line_through(few.curve[i], more.curve[i]));
    }
  } else {
    const auto most = [](const std::vector<std::int64_t>& curve) {
      return curve.empty() ? 0 : *std::max_element(curve.begin(), curve.end());
    };
    memory.curve.push_back(line_through(most(few.curve), most(more.curve)));
  }
  return memory;
}

}  // namespace cohort::train
