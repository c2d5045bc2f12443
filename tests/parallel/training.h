#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/parallel/reducer.h"
#include "tests/parallel/nets.h"

namespace cohort::test {

constexpr int kSteps = 20;  // past the second grouping

inline at::Tensor loss_of(Stack& net, const at::Tensor& input) {
  return net->forward(input).square().mean();
}

// A step with momentum, so that a gradient that is wrong once shows for ever.
class Descent {
 public:
  explicit Descent(const torch::nn::Module& module) : parameters_(module.parameters()) {}
  void zero_grad() {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }
  void step() {
    const at::NoGradGuard no_grad;
    momenta_.resize(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor gradient = parameters_[i].grad();
      if (!gradient.defined()) continue;
      momenta_[i] = momenta_[i].defined() ? momenta_[i] * 0.9 + gradient : gradient.clone();
      parameters_[i].sub_(momenta_[i], 0.5);
    }
  }

 private:
  std::vector<at::Tensor> parameters_, momenta_;
};

inline void expect_near(const Stack& net, const Stack& want, double tolerance) {
  const auto expected = want->named_parameters();
  for (const auto& entry : net->named_parameters()) {
    const at::Tensor& other = expected[entry.key()];
    EXPECT_LE((entry.value() - other).norm().item<double>(), tolerance * other.norm().item<double>())
        << entry.key();
  }
}

inline bool same_bits(const Stack& a, const Stack& b) {
  const auto first = a->parameters(), second = b->parameters();
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (!at::equal(first[i], second[i])) return false;
  }
  return true;
}

// `steps` steps with weights; the batch has 7 samples, so shares are not even.
inline Stack train(comm::Group& group, const parallel::ReducerOptions& options, int steps = kSteps) {
  Stack net = make_stack();
  parallel::Reducer reducer(group, parallel::parameters_to_reduce(*net), options);
  Descent descent(*net);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor share = share_of(wave(7) + step, group.rank(), group.size());
    descent.zero_grad();
    const at::Tensor loss = loss_of(net, share);
    reducer.prepare(parallel::StepInfo{.weight = static_cast<double>(share.size(0))}, {{loss}});
    loss.backward();
    EXPECT_EQ(reducer.finish().weight, 7);
    descent.step();
  }
  return net;
}

inline Stack train_alone(int steps = kSteps) {
  Stack net = make_stack();
  Descent descent(*net);
  for (int step = 0; step < steps; ++step) {
    descent.zero_grad();
    loss_of(net, wave(7) + step).backward();
    descent.step();
  }
  return net;
}

}  // namespace cohort::test
