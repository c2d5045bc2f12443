#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>

/// Layers that take a given time and compute nothing: they show what a schedule does on any machine.
namespace cohort::pipeline {

/// How long a SleepingLayer sleeps.
struct SleepTimes {
  std::chrono::microseconds forward{1000};          ///< in forward()
  std::chrono::microseconds input_gradient{1000};   ///< in backward, where the input needs a gradient
  std::chrono::microseconds weight_gradient{1000};  ///< in backward, where the weight's is asked for
};

/// Hands its input on, sleeping: in its backward for each of the two gradients that is asked for.
class SleepingLayerImpl : public torch::nn::Module {
 public:
  explicit SleepingLayerImpl(SleepTimes times);
  /// Sleeps for SleepTimes::forward, and returns the input's values.
  at::Tensor forward(const at::Tensor& input);

 private:
  SleepTimes times_;
  at::Tensor weight_;
};
TORCH_MODULE(SleepingLayer);

}  // namespace cohort::pipeline
