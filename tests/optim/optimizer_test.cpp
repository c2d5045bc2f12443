#include "cohort/optim/optimizer.h"

#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/finite.h"
#include "cohort/optim/sgd.h"
#include "tests/optim/support.h"
#include "tests/support/throws.h"

namespace cohort::test {
extern std::atomic<std::int64_t> allocations;  // count_allocations.cpp
}

namespace cohort::optim {
namespace {

using test::fresh_parameters;
using test::same_bits;
using test::set_gradients;
using test::value;
using Tensors = std::vector<at::Tensor>;

using Maker = std::function<std::unique_ptr<Optimizer>(const Tensors&)>;

Maker sgd(const SGDOptions& options) {
  return [=](const Tensors& p) { return std::make_unique<SGD>(p, options); };
}
Maker adam(const AdamOptions& options) {
  return [=](const Tensors& p) { return std::make_unique<Adam>(p, options); };
}
Maker adamw(const AdamWOptions& options) {
  return [=](const Tensors& p) { return std::make_unique<AdamW>(p, options); };
}

std::map<std::string, Maker> golden_cases() {
  return {
      {"sgd", sgd(SGDOptions(0.1))},
      {"sgd_momentum", sgd(SGDOptions(0.1).momentum(0.9).weight_decay(0.01))},
      {"sgd_nesterov", sgd(SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true))},
      {"sgd_all", sgd(SGDOptions(0.1).momentum(0.8).dampening(0.3).maximize(true))},
      {"adam", adam(AdamOptions(0.01))},
      {"adam_all",
       adam(AdamOptions(0.01).beta1(0.8).beta2(0.95).eps(1e-6).weight_decay(0.1).amsgrad(true).maximize(
           true))},
      {"adamw", adamw(AdamWOptions(0.01))},
      {"adamw_all", adamw(AdamWOptions(0.01).beta1(0.8).beta2(0.95).weight_decay(0.1).amsgrad(true))},
  };
}

template <typename Step>
void five_steps(Tensors& parameters, const Step& step) {
  for (std::int64_t k = 1; k <= 5; ++k) {
    set_gradients(parameters, k);
    step();
  }
}

void expect_same(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t p = 0; p < a.size(); ++p) EXPECT_TRUE(same_bits(a[p], b[p])) << "parameter " << p;
}

// The fused kernel ends each tensor element by element and rounds there as scalar code does, LibTorch's as
// vectors do: whole vectors are bit-equal, the rest (fewer than 16 elements of a tensor) to rounding.
// PyTorch's fused=True and its default differ in the same elements.
void expect_same_vectors(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t p = 0; p < a.size(); ++p) {
    const std::int64_t whole = a[p].numel() / 16 * 16;
    const at::Tensor left = a[p].detach().flatten(), right = b[p].detach().flatten();
    EXPECT_TRUE(at::equal(left.slice(0, 0, whole), right.slice(0, 0, whole))) << "parameter " << p;
    EXPECT_LE((left - right).abs().max().item<double>(), 1e-6) << "parameter " << p;
  }
}

TEST(OptimizerTest, EqualsPythonsFusedOptimizers) {
  // Bitwise where the file was made on the same vector instructions, else as rounding allows.
  const bool bitwise = test::read_golden("steps.txt").at("capability")[0][0] == at::get_cpu_capability();
  for (const auto& [name, make] : golden_cases()) {
    Tensors parameters = fresh_parameters();
    const auto optimizer = make(parameters);
    five_steps(parameters, [&] { optimizer->step(); });
    const Tensors golden = test::golden_tensors(name);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const at::Tensor ours = parameters[p].detach().flatten().to(at::kDouble);
      EXPECT_LE((ours - golden[p]).abs().max().item<double>(), bitwise ? 0.0 : 2e-6)
          << name << " parameter " << p;
    }
  }
}

TEST(OptimizerTest, SgdIsBitEqualToLibTorchs) {
  for (const auto& options : {SGDOptions(0.1), SGDOptions(0.1).momentum(0.9).weight_decay(0.01),
                              SGDOptions(0.1).momentum(0.9).dampening(0.5),
                              SGDOptions(0.1).momentum(0.9).weight_decay(5e-4).nesterov(true)}) {
    Tensors ours = fresh_parameters(), theirs = fresh_parameters();
    SGD optimizer(ours, options);
    torch::optim::SGD peer(theirs, torch::optim::SGDOptions(0.1)
                                       .momentum(options.momentum())
                                       .dampening(options.dampening())
                                       .weight_decay(options.weight_decay())
                                       .nesterov(options.nesterov()));
    five_steps(ours, [&] { optimizer.step(); });
    five_steps(theirs, [&] { peer.step(); });
    expect_same_vectors(ours, theirs);
  }
}

template <typename Ours, typename Theirs, typename OurOptions, typename TheirOptions>
void expect_near_libtorch(const OurOptions& options, const TheirOptions& peer_options) {
  Tensors ours = fresh_parameters(), theirs = fresh_parameters();
  Ours optimizer(ours, options);
  Theirs peer(theirs, peer_options);
  five_steps(ours, [&] { optimizer.step(); });
  five_steps(theirs, [&] { peer.step(); });
  for (std::size_t p = 0; p < ours.size(); ++p)
    EXPECT_LE((ours[p] - theirs[p]).abs().max().item<double>(), 1e-6) << "parameter " << p;
}

TEST(OptimizerTest, AdamAndAdamWAreLibTorchsToAMillionth) {
  for (bool amsgrad : {false, true}) {
    expect_near_libtorch<Adam, torch::optim::Adam>(
        AdamOptions(0.01).weight_decay(0.1).amsgrad(amsgrad),
        torch::optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(amsgrad));
    expect_near_libtorch<AdamW, torch::optim::AdamW>(
        AdamWOptions(0.01).weight_decay(0.1).amsgrad(amsgrad),
        torch::optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(amsgrad));
  }
}

// Steps parameters that `prepare` laid out in its own way, and gradients that `lay_gradient` did.
void expect_layout_does_not_matter(const std::function<at::Tensor(const at::Tensor&)>& prepare,
                                   const std::function<at::Tensor(const at::Tensor&)>& lay_gradient) {
  for (const auto& [name, make] : golden_cases()) {
    Tensors plain = {value(0, 0).set_requires_grad(true)};
    Tensors other = {prepare(value(0, 0)).set_requires_grad(true)};
    const auto a = make(plain), b = make(other);
    for (int step = 1; step <= 3; ++step) {
      plain[0].mutable_grad() = value(0, step);
      other[0].mutable_grad() = lay_gradient(value(0, step));
      a->step();
      b->step();
    }
    // Where vectors end differs between layouts, and with it whether a product is rounded before it is added.
    EXPECT_LE((plain[0] - other[0]).abs().max().item<double>(), 1e-6) << name;
    EXPECT_GT((plain[0] - value(0, 0)).abs().max().item<double>(), 1e-3) << name;
  }
}

at::Tensor channels_last(const at::Tensor& t) {
  return t.contiguous(at::MemoryFormat::ChannelsLast);
}
at::Tensor contiguous(const at::Tensor& t) {
  return t.contiguous();
}
at::Tensor with_gaps(const at::Tensor& t) {
  at::Tensor wide = at::full({t.size(0), t.size(1), t.size(2), 2 * t.size(3)}, 99.0);
  at::Tensor view = wide.slice(3, 0, 2 * t.size(3), 2);
  view.copy_(t);
  return view.detach();
}

TEST(OptimizerTest, ChannelsLastParametersAndGradientsGoStraightIn) {
  expect_layout_does_not_matter(channels_last, channels_last);
}
TEST(OptimizerTest, GradientsLaidOutUnlikeTheirParameterAreReadInTheRightOrder) {
  expect_layout_does_not_matter(channels_last, contiguous);
  expect_layout_does_not_matter(contiguous, channels_last);
  expect_layout_does_not_matter(contiguous, with_gaps);
}
TEST(OptimizerTest, ParametersWithGapsAreSteppedAndTheGapsLeftAlone) {
  expect_layout_does_not_matter(with_gaps, contiguous);
  expect_layout_does_not_matter(with_gaps, with_gaps);
  at::Tensor wide = at::full({4, 6}, 99.0);
  at::Tensor view = wide.slice(1, 0, 6, 2).detach().set_requires_grad(true);
  view.mutable_grad() = at::ones({4, 3});
  SGD({view}, SGDOptions(1.0)).step();
  EXPECT_TRUE(at::equal(wide.slice(1, 0, 6, 2), at::full({4, 3}, 98.0)));
  EXPECT_TRUE(at::equal(wide.slice(1, 1, 6, 2), at::full({4, 3}, 99.0)));
}

// sgn() hands back zeros without memory, the imaginary part of a conjugate a lazily negative gradient.
TEST(OptimizerTest, GradientsWhoseValuesDoNotLieInMemoryAreStepped) {
  expect_layout_does_not_matter(contiguous, [](const at::Tensor& t) {
    return at::imag(at::complex(at::zeros_like(t), t.neg()).conj());
  });
  expect_layout_does_not_matter(contiguous, [](const at::Tensor& t) { return t.neg()._neg_view(); });
  for (const auto& [name, make] : golden_cases()) {
    Tensors plain = {value(0, 0).set_requires_grad(true)}, other = {value(0, 0).set_requires_grad(true)};
    const auto a = make(plain), b = make(other);
    for (int step = 1; step <= 4; ++step) {
      const bool is_zero = step % 2 == 0;
      plain[0].mutable_grad() = is_zero ? at::zeros_like(plain[0]) : value(0, step);
      other[0].mutable_grad() = is_zero ? at::_efficientzerotensor(plain[0].sizes()) : value(0, step);
      EXPECT_FALSE(find_non_finite(b->param_groups()).any());
      EXPECT_EQ(clip_grad_norm_(plain, 2.0), clip_grad_norm_(other, 2.0));
      a->step();
      b->step();
    }
    EXPECT_TRUE(same_bits(plain[0], other[0])) << name;
  }
}

TEST(OptimizerTest, ParametersMayBeConvertedBetweenSteps) {
  Tensors plain = {value(0, 0).set_requires_grad(true)}, moved = {value(0, 0).set_requires_grad(true)};
  Adam a(plain, AdamOptions(0.01)), b(moved, AdamOptions(0.01));
  for (int step = 1; step <= 4; ++step) {
    if (step == 3) moved[0].set_data(channels_last(moved[0].detach()));
    plain[0].mutable_grad() = value(0, step);
    moved[0].mutable_grad() = channels_last(value(0, step));
    a.step();
    b.step();
  }
  EXPECT_LE((plain[0] - moved[0]).abs().max().item<double>(), 1e-6);
  moved[0].set_data(moved[0].detach().to(at::kDouble));
  moved[0].mutable_grad() = value(0, 5).to(at::kDouble);
  b.step();
  EXPECT_EQ(b.state().tensors.at("state.0.exp_avg").scalar_type(), at::kDouble);
  moved[0].set_data(at::zeros({2}));
  moved[0].mutable_grad() = at::ones({2});
  COHORT_EXPECT_THROW_WITH(b.step(), UsageError, "a parameter changed its shape");
}

TEST(OptimizerTest, MixedDtypesAreSteppedTogether) {
  Tensors mixed, doubles = {value(2, 0).to(at::kDouble).set_requires_grad(true)};
  Tensors floats = {value(1, 0).set_requires_grad(true)};
  mixed = {value(1, 0).set_requires_grad(true), value(2, 0).to(at::kDouble).set_requires_grad(true),
           value(1, 0).to(at::kBFloat16).set_requires_grad(true)};
  Adam all(mixed, AdamOptions(0.01)), first(floats, AdamOptions(0.01)), second(doubles, AdamOptions(0.01));
  for (int step = 1; step <= 3; ++step) {
    mixed[0].mutable_grad() = value(1, step);
    mixed[1].mutable_grad() = value(2, step).to(at::kDouble);
    mixed[2].mutable_grad() = value(1, step).to(at::kBFloat16);
    floats[0].mutable_grad() = value(1, step);
    doubles[0].mutable_grad() = value(2, step).to(at::kDouble);
    all.step();
    first.step();
    second.step();
  }
  EXPECT_TRUE(same_bits(mixed[0], floats[0]));
  EXPECT_TRUE(same_bits(mixed[1], doubles[0]));
  EXPECT_LE((mixed[2].to(at::kFloat) - floats[0]).abs().max().item<double>(), 0.05);
  EXPECT_FALSE(same_bits(mixed[2].to(at::kFloat), value(1, 0)));
}

TEST(OptimizerTest, GroupsHaveTheirOwnOptions) {
  Tensors parameters = fresh_parameters(), alone = fresh_parameters();
  SGD both(
      {{.params = {parameters[0]}, .name = "slow", .lr = 0.01}, {.params = {parameters[1]}, .momentum = 0.5}},
      SGDOptions(0.1).weight_decay(0.2));
  SGD slow(Tensors{alone[0]}, SGDOptions(0.01).weight_decay(0.2));
  SGD fast(Tensors{alone[1]}, SGDOptions(0.1).momentum(0.5).weight_decay(0.2));
  five_steps(parameters, [&] { both.step(); });
  five_steps(alone, [&] { slow.step(), fast.step(); });
  expect_same(parameters, alone);
  EXPECT_EQ(both.param_groups()[0].name, "slow");
  EXPECT_DOUBLE_EQ(both.param_groups()[1].lr, 0.1);
}

TEST(OptimizerTest, GradientsAreNotKeptAlive) {
  Tensors parameters = fresh_parameters();
  Adam optimizer(parameters);
  set_gradients(parameters, 1);
  optimizer.step();
  EXPECT_EQ(parameters[0].grad().use_count(), 1);
  at::Tensor gradient = parameters[0].grad();
  optimizer.zero_grad();
  EXPECT_FALSE(parameters[0].grad().defined());
  EXPECT_EQ(gradient.use_count(), 1);
  set_gradients(parameters, 1);
  optimizer.zero_grad(false);
  EXPECT_TRUE(at::equal(parameters[0].grad(), at::zeros_like(parameters[0])));
}

TEST(OptimizerTest, AStepAllocatesNothing) {
  for (const auto& [name, make] : golden_cases()) {
    Tensors parameters = fresh_parameters();
    const auto optimizer = make(parameters);
    set_gradients(parameters, 1);
    optimizer->step();
    const std::int64_t before = test::allocations.load();
    for (int k = 0; k < 10; ++k) optimizer->step();
    EXPECT_EQ(test::allocations.load() - before, 0) << name;
  }
}

TEST(OptimizerTest, AutogradSeesThatParametersChanged) {
  at::Tensor parameter = at::ones({3}).set_requires_grad(true);
  const at::Tensor loss = (parameter * parameter).sum();  // keeps the parameter for backward
  parameter.mutable_grad() = at::ones({3});
  SGD(Tensors{parameter}).step();
  COHORT_EXPECT_THROW_WITH(loss.backward(), c10::Error, "modified by an inplace operation");
}

TEST(OptimizerTest, MomentumMayBeSwitchedOnLater) {
  Tensors ours = fresh_parameters(), theirs = fresh_parameters();
  SGD optimizer(ours, SGDOptions(0.1));
  torch::optim::SGD peer(theirs, torch::optim::SGDOptions(0.1));
  for (int step = 1; step <= 6; ++step) {
    if (step == 3) {
      optimizer.set_momentum(0.9);
      static_cast<torch::optim::SGDOptions&>(peer.param_groups()[0].options()).momentum(0.9);
    }
    set_gradients(ours, step == 1 || step > 3 ? step : 1);
    set_gradients(theirs, step == 1 || step > 3 ? step : 1);
    optimizer.step();
    peer.step();
  }
  expect_same_vectors(ours, theirs);
}

TEST(OptimizerTest, SparseGradientsAreRejectedAndNothingChanges) {
  Tensors parameters = {value(0, 0).set_requires_grad(true), at::ones({3, 2}).set_requires_grad(true)};
  parameters[0].mutable_grad() = value(0, 1);
  parameters[1].mutable_grad() = at::ones({3, 2}).to_sparse();
  const auto expect_rejected = [&](Optimizer&& optimizer) {
    COHORT_EXPECT_THROW_WITH(optimizer.step(), UsageError,
                             optimizer.type() + " does not step sparse gradients");
    EXPECT_TRUE(same_bits(parameters[0], value(0, 0)));
    EXPECT_EQ(parameters[0].grad().use_count(), 1);
  };
  expect_rejected(SGD(parameters, SGDOptions(0.1).momentum(0.9)));
  expect_rejected(SGD(parameters, SGDOptions(0.1).weight_decay(0.1)));
  expect_rejected(Adam(parameters));
  parameters[1].mutable_grad() = at::ones({3, 2}).to_sparse_csr();
  expect_rejected(SGD(parameters, SGDOptions(0.1)));
}

// As an embedding gives it: a row for each use, also of a word that is used twice.
at::Tensor gradient_of_uses(int step) {
  const at::Tensor words = at::tensor({0, 2, 0, 5}, at::kLong).view({1, 4});
  return at::sparse_coo_tensor(words, (at::arange(16, at::kFloat).view({4, 4}) + step).sin(), {8, 4});
}

TEST(OptimizerTest, SGDStepsSparseGradientsAsTorchDoes) {
  const auto make = [] {
    return Tensors{at::arange(32, at::kFloat).view({8, 4}).cos().set_requires_grad(true),
                   at::ones({16}).set_requires_grad(true)};
  };
  const Tensors ours = make(), theirs = make();
  SGD optimizer(ours, SGDOptions(0.1));
  torch::optim::SGD peer(theirs, torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 5; ++step) {
    for (const Tensors* parameters : {&ours, &theirs}) {
      at::Tensor& gradient = (*parameters)[0].mutable_grad();
      gradient = gradient_of_uses(step);
      if (step == 2) gradient = gradient.to_dense();  // the layout may change between steps
      if (step == 3) gradient.reset();
      (*parameters)[1].mutable_grad() = at::arange(16, at::kFloat).sin();
    }
    optimizer.step();
    peer.step();
    expect_same_vectors(ours, theirs);
  }
}

TEST(OptimizerTest, ASparseStepMaximizesAndIsCounted) {
  const Tensors parameters{at::ones({8, 4}).set_requires_grad(true)};
  SGD optimizer(parameters, SGDOptions(0.5).maximize(true));
  parameters[0].mutable_grad() = gradient_of_uses(0);
  const at::Tensor expected = at::ones({8, 4}).add_(gradient_of_uses(0), 0.5);
  const auto version = parameters[0]._version();
  optimizer.step();
  EXPECT_TRUE(same_bits(parameters[0], expected));
  EXPECT_GT(parameters[0]._version(), version);
  // A flag as that of an accelerator: nothing changes where a gradient is not finite.
  parameters[0].mutable_grad() =
      at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::full({1, 4}, test::kInfinity), {8, 4});
  optimizer.step_unless({.on_device = at::ones({})});
  EXPECT_TRUE(at::equal(parameters[0], expected));
}

TEST(OptimizerTest, RejectsParametersThatCannotBeStepped) {
  const at::Tensor good = at::ones({2}).set_requires_grad(true);
  const at::Tensor computed = good * 2;
  COHORT_EXPECT_THROW_WITH(SGD(Tensors{}), UsageError, "there are no parameters");
  COHORT_EXPECT_THROW_WITH(SGD(Tensors{at::Tensor()}), UsageError,
                           "parameter 0 of group 0 is an undefined tensor");
  COHORT_EXPECT_THROW_WITH(SGD((Tensors{good, computed})), UsageError,
                           "parameter 1 of group 0 is not a leaf");
  COHORT_EXPECT_THROW_WITH(SGD(Tensors{at::ones({2}, at::kLong)}), UsageError,
                           "has dtype Long, expected floating");
  COHORT_EXPECT_THROW_WITH(SGD(Tensors{at::ones({2}, at::kComplexFloat)}), UsageError, "view_as_real");
  COHORT_EXPECT_THROW_WITH(SGD(Tensors{at::ones({2}).to_sparse()}), UsageError, "expected strided");
  std::vector<ParamGroup> twice = {{.params = {good}}, {.params = {good}, .name = "again"}};
  COHORT_EXPECT_THROW_WITH(SGD(twice), UsageError, "parameter 0 of group 1 (again) was given before");
}

TEST(OptimizerTest, RejectsOptionsOutOfRange) {
  const Tensors p = {at::ones({2}).set_requires_grad(true)};
  COHORT_EXPECT_THROW_WITH(SGD(p, SGDOptions(-1)), UsageError, "lr is -1, expected 0 or more");
  COHORT_EXPECT_THROW_WITH(SGD(p, SGDOptions(1).momentum(-1)), UsageError, "momentum is -1");
  COHORT_EXPECT_THROW_WITH(SGD(p, SGDOptions(1).weight_decay(-1)), UsageError, "weight_decay is -1");
  COHORT_EXPECT_THROW_WITH(SGD(p, SGDOptions(1).nesterov(true)), UsageError,
                           "nesterov needs momentum above 0");
  COHORT_EXPECT_THROW_WITH(Adam(p, AdamOptions(-1)), UsageError, "lr is -1");
  COHORT_EXPECT_THROW_WITH(Adam(p, AdamOptions(1).eps(-1)), UsageError, "eps is -1");
  COHORT_EXPECT_THROW_WITH(Adam(p, AdamOptions(1).beta1(1)), UsageError,
                           "beta1 is 1, expected 0 or more and below 1");
  COHORT_EXPECT_THROW_WITH(Adam(p, AdamOptions(1).beta2(2)), UsageError, "beta2 is 2");
  COHORT_EXPECT_THROW_WITH(Adam(p, AdamOptions(1).weight_decay(-1)), UsageError, "weight_decay is -1");
  std::vector<ParamGroup> foreign = {{.params = p, .name = "head", .momentum = 0.9}};
  COHORT_EXPECT_THROW_WITH(
      Adam(foreign), UsageError,
      "group \"head\" sets momentum, which adam does not have. Try: it belongs to sgd; ");
  std::vector<ParamGroup> flag = {{.params = p, .amsgrad = true}};
  COHORT_EXPECT_THROW_WITH(SGD(flag), UsageError, "sets amsgrad, which sgd does not have");
  SGD sgd(p);
  COHORT_EXPECT_THROW_WITH(sgd.set_lr(-1), UsageError, "got -1, expected 0 or more");
  COHORT_EXPECT_THROW_WITH(sgd.set_lr(std::numeric_limits<double>::infinity()), UsageError, "got inf");
  COHORT_EXPECT_THROW_WITH(sgd.set_lr(std::numeric_limits<double>::quiet_NaN()), UsageError, "got nan");
  sgd.set_lr(0.25);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].lr, 0.25);
}

}  // namespace
}  // namespace cohort::optim
