#include "cohort/autograd/run_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

using autograd::recompute;
using RunTensors = std::vector<at::Tensor>;

// What a module keeps of this thread: a number, and tensors at which a backward begins too.
thread_local double next_number = 1;
thread_local RunTensors roots_of_run;

class NumberScope : public autograd::RunScope {
 public:
  explicit NumberScope(double first) : before_(std::exchange(next_number, first)) {}
  ~NumberScope() override { next_number = before_; }
  RunTensors end() override { return std::exchange(roots_of_run, {}); }

 private:
  const double before_;
};

class NumberState : public autograd::RunState {
 public:
  static std::unique_ptr<RunState> take() { return std::make_unique<NumberState>(); }
  std::unique_ptr<autograd::RunScope> begin_first_run(const RunTensors&) override { return begin(); }
  std::unique_ptr<autograd::RunScope> begin_second_run(const RunTensors&) override { return begin(); }

 private:
  std::unique_ptr<autograd::RunScope> begin() const { return std::make_unique<NumberScope>(first_); }
  const double first_ = next_number;
};

// A step whose backward gives a gradient of its own.
struct GivesThree : torch::autograd::Function<GivesThree> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static RunTensors backward(torch::autograd::AutogradContext*, const RunTensors& gradients) {
    return {at::full_like(gradients.at(0), 3)};
  }
};

class RunStateTest : public testing::Test {
 protected:
  RunStateTest() { autograd::set_run_state(NumberState::take); }
  ~RunStateTest() override { autograd::set_run_state(nullptr); }
};

TEST_F(RunStateTest, BothRunsBeginWithWhatTheThreadHas) {
  next_number = 5;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const auto fn = [](const at::Tensor& in) {
    const double first = next_number++;
    return in * first * next_number;
  };
  const at::Tensor y = recompute(fn, x);
  next_number = 100;
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 30.0F))) << x.grad();
  EXPECT_EQ(next_number, 100);
}

TEST_F(RunStateTest, ABackwardBeginsAtTheRootsOfTheRunToo) {
  const at::Tensor x = at::ones({2}).requires_grad_(), weight = at::ones({2}).requires_grad_();
  const auto fn = [&](const at::Tensor& in) {
    roots_of_run = {GivesThree::apply(weight)};
    return in * 2;
  };
  recompute(fn, x).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0F)));
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 3.0F)));
}

TEST_F(RunStateTest, AParameterThatOnlyTheFirstRunUsesIsAnError) {
  const at::Tensor x = at::ones({2}).requires_grad_(), weight = at::ones({2}).requires_grad_();
  bool is_first = true;
  const at::Tensor y = recompute(
      [&](const at::Tensor& in) { return std::exchange(is_first, false) ? in * weight : in * 1; }, x);
  COHORT_EXPECT_THROW_WITH(y.sum().backward(), UsageError,
                           "fn does not use a parameter Float[2] when it runs again in backward");
}

}  // namespace
}  // namespace cohort
