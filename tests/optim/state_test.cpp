#include <gtest/gtest.h>

#include <memory>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule.h"
#include "cohort/optim/sgd.h"
#include "tests/optim/support.h"
#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

using test::fresh_parameters;
using test::same_bits;
using test::set_gradients;
using Tensors = std::vector<at::Tensor>;

OptimizerState copy(OptimizerState state) {
  for (auto& [name, tensor] : state.tensors) tensor = tensor.clone(at::MemoryFormat::Contiguous);
  return state;
}

template <typename Make>
void expect_resume_is_bitwise(const Make& make, bool channels_last = false) {
  Tensors straight = fresh_parameters();
  if (channels_last) straight[0].set_data(straight[0].detach().contiguous(at::MemoryFormat::ChannelsLast));
  const auto optimizer = make(straight);
  Tensors resumed;
  std::unique_ptr<Optimizer> second;
  for (int step = 1; step <= 6; ++step) {
    if (step == 3) {  // the second parameter has another step count from here on
      optimizer->set_lr(0.005);
      for (const at::Tensor& p : straight) resumed.push_back(p.detach().clone().set_requires_grad(true));
      second = make(resumed);
      second->load_state(copy(optimizer->state()));
      EXPECT_DOUBLE_EQ(second->param_groups()[0].lr, 0.005);
    }
    set_gradients(straight, step);
    optimizer->step();
    if (!second) continue;
    set_gradients(resumed, step);
    second->step();
  }
  for (std::size_t p = 0; p < straight.size(); ++p) EXPECT_TRUE(same_bits(straight[p], resumed[p])) << p;
  const OptimizerState a = optimizer->state(), b = second->state();
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) EXPECT_TRUE(same_bits(tensor, b.tensors.at(name))) << name;
  EXPECT_EQ(a.scalars, b.scalars);
}

TEST(OptimizerStateTest, ResumeIsBitwise) {
  expect_resume_is_bitwise([](const Tensors& p) {
    return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01));
  });
  expect_resume_is_bitwise([](const Tensors& p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); });
  for (bool channels_last : {false, true}) {
    expect_resume_is_bitwise([](const Tensors& p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); },
                             channels_last);
    expect_resume_is_bitwise(
        [](const Tensors& p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).amsgrad(true)); },
        channels_last);
  }
}

TEST(OptimizerStateTest, NamesAreThoseOfPyTorch) {
  Tensors parameters = fresh_parameters();
  Adam adam({{.params = {parameters[0]}}, {.params = {parameters[1], parameters[2]}, .lr = 0.5}});
  set_gradients(parameters, 2);  // the second has none
  adam.step();
  const OptimizerState state = adam.state();
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state.tensors) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step",
                                             "state.2.exp_avg", "state.2.exp_avg_sq", "state.2.step"}));
  EXPECT_EQ(state.tensors.at("state.2.step").item<float>(), 1.0f);
  EXPECT_EQ(state.tensors.at("state.2.step").scalar_type(), at::kFloat);
  EXPECT_DOUBLE_EQ(state.scalars.at("group.1.lr"), 0.5);
  EXPECT_DOUBLE_EQ(state.scalars.at("group.1.num_params"), 2.0);
  EXPECT_DOUBLE_EQ(state.scalars.at("group.0.beta2"), 0.999);
}

TEST(OptimizerStateTest, WhatDoesNotFitIsListedAndNothingChanges) {
  Tensors parameters = fresh_parameters(), sgd_parameters = fresh_parameters();
  Adam adam(parameters);
  SGD sgd(sgd_parameters, SGDOptions(0.1).momentum(0.9));
  set_gradients(parameters, 1);
  set_gradients(sgd_parameters, 1);
  adam.step();
  sgd.step();
  const OptimizerState before = copy(adam.state());

  COHORT_EXPECT_THROW_WITH(adam.load_state(sgd.state()), DataError,
                           "state.0.momentum_buffer: not a part of this optimizer");
  COHORT_EXPECT_THROW_WITH(adam.load_state(sgd.state()), DataError, "group.0.beta1: missing");
  COHORT_EXPECT_THROW_WITH(adam.load_state(sgd.state()), DataError,
                           "group.0.momentum: not a part of this optimizer");
  OptimizerState broken = copy(before);
  broken.tensors["state.1.exp_avg"] = at::zeros({4});
  broken.tensors.erase("state.2.step");
  broken.scalars["group.0.num_params"] = 7;
  broken.scalars["group.0.lr"] = 42;
  COHORT_EXPECT_THROW_WITH(adam.load_state(broken), DataError,
                           "state.1.exp_avg: got shape [4], expected [37]");
  COHORT_EXPECT_THROW_WITH(adam.load_state(broken), DataError, "state.2.step: missing");
  COHORT_EXPECT_THROW_WITH(adam.load_state(broken), DataError, "num_params: got 7, expected 3");
  broken = copy(before);
  broken.tensors.erase("state.0.exp_avg_sq");
  COHORT_EXPECT_THROW_WITH(adam.load_state(broken), DataError, "state.0.exp_avg_sq: missing");

  broken = copy(before);
  broken.tensors["state.0.step"] = at::zeros({2});
  COHORT_EXPECT_THROW_WITH(adam.load_state(broken), DataError,
                           "state.0.step: got shape [2], expected one number");

  const OptimizerState after = adam.state();
  EXPECT_EQ(after.scalars, before.scalars);
  for (const auto& [name, tensor] : before.tensors)
    EXPECT_TRUE(same_bits(tensor, after.tensors.at(name))) << name;
}

/// The example in optimizer.h, with a state of its own.
class Momentum : public Optimizer {
 public:
  explicit Momentum(Tensors params) : Optimizer({{.params = std::move(params)}}) {
    fill_options(ParamGroup{.lr = 0.5});
  }
  std::string type() const override { return "momentum"; }
  void step() override {
    at::NoGradGuard no_grad;
    for (std::size_t g = 0; g < param_groups().size(); ++g) {
      ParamGroup& group = param_groups()[g];
      for (std::size_t i = 0; i < group.params.size(); ++i) {
        if (!group.params[i].grad().defined()) continue;
        at::Tensor& velocity = param_state(g, i).tensors[0];
        velocity =
            velocity.defined() ? velocity * 0.5 + group.params[i].grad() : group.params[i].grad().clone();
        group.params[i].sub_(velocity, group.lr);
      }
    }
  }

 protected:
  std::vector<std::string> state_names() const override { return {"velocity"}; }
};

TEST(OptimizerStateTest, AUsersOptimizerIsSavedAndScheduledToo) {
  expect_resume_is_bitwise([](const Tensors& p) { return std::make_unique<Momentum>(p); });
  Momentum optimizer(fresh_parameters());
  step_decay(1, 0.1)->apply(optimizer, 1);
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].lr, 0.05);
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 10})->apply(optimizer, 1), UsageError,
                           "the optimizer momentum has no momentum");
}

}  // namespace
}  // namespace cohort::optim
