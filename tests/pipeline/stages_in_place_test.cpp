// Stages that change in place what they get.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <utility>

#include "cohort/base/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

TEST(StagesInPlaceTest, MayWorkInPlaceOnWhatTheyGet) {
  const auto model = [] {
    torch::manual_seed(8);
    return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                                 torch::nn::Linear(4, 2));
  }();
  auto whole = model;
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  plain_step([&](const at::Tensor& x) { return whole->forward(x); }, input, target, {3, 3});
  const Tensors expected = take_gradients(model->parameters());
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe(cut(model, {1}), two_placements(schedule));
    pipe.step(input, target, mse);
    expect_same_bits(take_gradients(model->parameters()), expected);
  }
}

// Micro-batches are parts of one tensor: what one changes is no change of the others.
TEST(StagesInPlaceTest, MayWorkInPlaceOnTheBatchAndTheLossOnWhatItGets) {
  torch::manual_seed(8);
  torch::nn::Linear a(4, 4), b(4, 2);
  const Stage first(
      [=](const Tensors& in) mutable { return Tensors{a->forward(at::Tensor(in.at(0)).mul_(2))}; },
      a->parameters());
  const auto loss = [](at::Tensor output, const at::Tensor& target) {
    return mse(output.div_(3), at::Tensor(target).mul_(0.5));
  };
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  const auto parameters = [&] {
    Tensors all = a->parameters();
    for (const at::Tensor& parameter : b->parameters()) all.push_back(parameter);
    return all;
  }();
  plain_step([&](const at::Tensor& x) { return b->forward(a->forward(x * 2)) / 3; }, input, target * 0.5,
             {3, 3});
  const Tensors expected = take_gradients(parameters);
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe({first, b}, two_placements(schedule));
    const at::Tensor x = input.clone(), y = target.clone();
    pipe.step(x, y, loss);
    expect_same_bits(take_gradients(parameters), expected);
    EXPECT_TRUE(at::equal(x, input * 2));
    EXPECT_TRUE(at::equal(y, target * 0.5));
    EXPECT_GT(x._version(), 0);
  }
  Pipeline pipe({first, b}, two_placements());
  const at::Tensor x = input.clone(), y = pipe.forward(x);
  mse(y / 3, target * 0.5).backward();
  const Tensors of_module = take_gradients(parameters);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::allclose(of_module[i], expected[i], 1e-4, 1e-6));
  const at::Tensor again = pipe.forward(x);
  x.add_(1);  // saved by the first stage
  COHORT_EXPECT_THROW_WITH(again.sum().backward(), StageError, "modified by an inplace operation");
}

TEST(StagesInPlaceTest, InPlaceWhereAnotherSeesItIsRejected) {
  torch::nn::Linear a(4, 4), b(4, 4), c(4, 2);
  const Stage twice(
      [=](const Tensors& in) mutable {
        const at::Tensor y = a->forward(in.at(0));
        return Tensors{y, y.narrow(1, 0, 4)};
      },
      a->parameters());
  const Stage both(
      [=](const Tensors& in) mutable { return Tensors{b->forward(at::Tensor(in.at(0)).relu_()) + in.at(1)}; },
      b->parameters());
  const Stage alone(
      [=](const Tensors& in) mutable { return Tensors{b->forward(at::Tensor(in.at(0)).relu_())}; },
      b->parameters());
  const Stage last([=](const Tensors& in) mutable { return Tensors{c->forward(in.at(0) + in.at(1))}; },
                   c->parameters());
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  Pipeline pipe({twice, both}, two_placements());
  COHORT_EXPECT_THROW_WITH(pipe.step(input, input, mse), StageError, "stage 1 (function) on");
  COHORT_EXPECT_THROW_WITH(pipe.step(input, input, mse), StageError, "shares its memory");
  PipelineOptions options = two_placements();
  options.placements.push_back(base::Placement::parse("cpu:0/c"));
  options.skips = {{.from = 0, .output = 1, .to = 2}};
  Pipeline skipped({twice, alone, last}, options);
  COHORT_EXPECT_THROW_WITH(skipped.step(input, target, mse), StageError, "shares its memory");
  Pipeline begins({alone, c}, two_placements());
  const at::Tensor x = input.clone().requires_grad_();
  COHORT_EXPECT_THROW_WITH(begins.step(x * 1, target, mse), StageError,
                           "input 0 needs a gradient and is changed in place");
  begins.step(input.clone(), target, mse);

  auto halves = [=](const at::Tensor& x) mutable {
    const at::Tensor y = a->forward(x);
    return Tensors{y.narrow(1, 0, 2), y.narrow(1, 2, 2)};
  };
  auto on_one = [=](const Tensors& in) mutable {
    return c->forward(at::cat({at::Tensor(in.at(0)).relu_(), in.at(1)}, 1));
  };
  plain_step([&](const at::Tensor& x) { return on_one(halves(x)); }, input, target, {3, 3});
  const Tensors expected = take_gradients(a->parameters());
  Pipeline of_halves({Stage([=](const Tensors& in) mutable { return halves(in.at(0)); }, a->parameters()),
                      Stage([=](const Tensors& in) mutable { return Tensors{on_one(in)}; }, c->parameters())},
                     two_placements());
  take_gradients(c->parameters());
  of_halves.step(input, target, mse);
  expect_same_bits(take_gradients(a->parameters()), expected);

  Stage again = alone;
  options.skips.clear();
  Pipeline recomputed({a, again.recompute(), c}, options);
  COHORT_EXPECT_THROW_WITH(recomputed.step(input, target, mse), StageError,
                           "fn changed its input 0 Float[3, 4] in place");
}

TEST(StagesInPlaceTest, ATensorThatIsReturnedTwiceMayBeChangedInPlace) {
  torch::manual_seed(3);
  torch::nn::Linear linear(4, 4);
  auto twice = [linear](const Tensors& in) mutable {
    const at::Tensor hidden = linear->forward(in[0]);
    return Tensors{hidden, hidden};
  };
  const auto in_place = [](const Tensors& in) {
    at::Tensor first = in[0];
    first.relu_();
    return Tensors{first + in[1]};
  };
  const auto mse = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  const at::Tensor x = torch::randn({8, 4}), y = torch::randn({8, 4});
  mse(in_place(twice(Tensors{x}))[0], y).backward();
  const at::Tensor expected = linear->weight.grad().clone();
  linear->weight.mutable_grad().reset();
  PipelineOptions options;
  options.placements = base::parse_placements("cpu:0/a,cpu:0/b");
  options.num_micro_batches = 1;
  Pipeline pipe({Stage(twice, linear->parameters()), Stage(in_place, {})}, options);
  pipe.step(x, y, mse);
  EXPECT_TRUE(at::equal(linear->weight.grad(), expected));
}

}  // namespace
}  // namespace cohort::pipeline
