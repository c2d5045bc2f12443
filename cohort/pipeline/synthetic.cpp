#include "cohort/pipeline/synthetic.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "cohort/pipeline/split_graph.h"

namespace cohort::pipeline {
namespace {

using Tensors = std::vector<at::Tensor>;

// Time without work: a schedule is tested on few cores as if there were many.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const SleepTimes& times) {
    std::this_thread::sleep_for(times.forward);
    context->save_for_backward({weight});
    context->saved_data["input"] = static_cast<std::int64_t>(times.input_gradient.count());
    context->saved_data["weight"] = static_cast<std::int64_t>(times.weight_gradient.count());
    // A new tensor: an input that is returned would get no node of its own.
    return input.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    Tensors result(3);
    if (context->needs_input_grad(0)) {
      std::this_thread::sleep_for(std::chrono::microseconds(context->saved_data["input"].toInt()));
      result[0] = gradients.at(0);
    }
    if (context->needs_input_grad(1)) {
      std::this_thread::sleep_for(std::chrono::microseconds(context->saved_data["weight"].toInt()));
      result[1] = at::zeros_like(context->get_saved_variables().at(0));
    }
    return result;
  }
};

}  // namespace

SleepingLayerImpl::SleepingLayerImpl(SleepTimes times)
    : times_(times), weight_(register_parameter("weight", at::ones({1}))) {
  // Each gradient takes a time of its own, so zb_h1 may compute them separately.
  register_splittable_backward<Sleep>();
}

at::Tensor SleepingLayerImpl::forward(const at::Tensor& input) {
  return Sleep::apply(input, weight_, times_);
}

}  // namespace cohort::pipeline
