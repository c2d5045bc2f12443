#include "cohort/autograd/anchor_node.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <set>
#include <string>

#include "cohort/autograd/tensor_box.h"
#include "cohort/core/torch_compat.h"

namespace cohort::autograd {
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

class AnchorBackward : public torch::autograd::Node {
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
    return {box_in_tensor(std::move(arrivals))};
  }
  std::string name() const override { return "cohort::autograd::AnchorBackward"; }
};

}  // namespace

at::Tensor make_anchor() {
  return box_in_tensor(std::unique_ptr<Arrivals>());
}

void attach_to_anchor(const at::Tensor& anchor, const Tensors& results) {
  auto node = COHORT_MAKE_NODE(AnchorBackward);
  node->set_next_edges({torch::autograd::impl::gradient_edge(anchor)});
  for (const at::Tensor& result : results) torch::autograd::set_history(result, node);
}

Tensors take_gradients(const at::Tensor& gradient_of_anchor) {
  Arrivals& arrivals = unbox<Arrivals>(gradient_of_anchor);
  for (auto& [device, ready] : arrivals.ready) ready.block(current_stream(device));
  for (const at::Tensor& gradient : arrivals.gradients) {
    // Its memory must not be handed out again before what is done with it here is done.
    if (gradient.defined() && !gradient.is_cpu()) gradient.record_stream(current_stream(gradient.device()));
  }
  return std::move(arrivals.gradients);
}

bool is_device_autograd_thread() {
  return c10::getThreadName().starts_with("pt_autograd_");
}

}  // namespace cohort::autograd
