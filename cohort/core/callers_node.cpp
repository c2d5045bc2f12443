#include "cohort/core/callers_node.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <set>
#include <string>

#include "cohort/core/carried.h"
#include "cohort/core/torch_compat.h"

namespace cohort::core {
namespace {

using Tensors = std::vector<at::Tensor>;

// Gradients, and when those on GPUs are there.
struct Arrivals {
  Tensors gradients;
  std::vector<std::pair<c10::Device, c10::Event>> ready;
};

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class DoorBackward : public torch::autograd::Node {
 public:
  Tensors apply(Tensors&& gradients) override {
    auto arrivals = std::make_unique<Arrivals>();
    arrivals->gradients = std::move(gradients);
    std::set<c10::DeviceIndex> seen;
    for (const at::Tensor& gradient : arrivals->gradients) {
      if (!gradient.defined() || gradient.is_cpu() || !seen.insert(gradient.device().index()).second)
        continue;
      c10::Event ready(gradient.device().type());
      ready.record(current_stream(gradient.device()));
      arrivals->ready.emplace_back(gradient.device(), std::move(ready));
    }
    return {carry(std::move(arrivals))};
  }
  std::string name() const override { return "cohort::core::DoorBackward"; }
};

}  // namespace

at::Tensor make_door() {
  return carry(std::unique_ptr<Arrivals>());
}

void come_through(const at::Tensor& door, const Tensors& results) {
  auto node = COHORT_MAKE_NODE(DoorBackward);
  node->set_next_edges({torch::autograd::impl::gradient_edge(door)});
  for (const at::Tensor& result : results) torch::autograd::set_history(result, node);
}

Tensors arrived(const at::Tensor& gradient_of_door) {
  Arrivals& arrivals = carried<Arrivals>(gradient_of_door);
  for (auto& [device, ready] : arrivals.ready) ready.block(current_stream(device));
  for (const at::Tensor& gradient : arrivals.gradients) {
    // Its memory must not be handed out again before what is done with it here is done.
    if (gradient.defined() && !gradient.is_cpu()) gradient.record_stream(current_stream(gradient.device()));
  }
  return std::move(arrivals.gradients);
}

bool is_gpus_thread() {
  return c10::getThreadName().starts_with("pt_autograd_");
}

}  // namespace cohort::core
