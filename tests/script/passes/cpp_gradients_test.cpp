// Backwards of which a part is computed by C++, without an operator that the recorder sees: what they fill,
// and operators beside them that read indices, or are not LibTorch's.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/script/script.h"
#include "tests/script/same_bits.h"

namespace cohort::script {
namespace {

using test::same_bits;
using torch::autograd::AutogradContext;

// As extensions have them: the gradient is written through pointers.
struct Filled : torch::autograd::Function<Filled> {
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x) { return x * 3; }
  static Tensors backward(AutogradContext* /*context*/, const Tensors& gradients) {
    const at::Tensor in = gradients[0].contiguous();
    at::Tensor out = at::empty_like(in);
    for (std::int64_t i = 0; i < in.numel(); ++i) {
      out.mutable_data_ptr<float>()[i] = 3 * in.const_data_ptr<float>()[i];
    }
    return {out};
  }
};

// The same numbers each time, from no operator.
struct Table : torch::autograd::Function<Table> {
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x) { return x * 1; }
  static Tensors backward(AutogradContext* /*context*/, const Tensors& /*gradients*/) {
    return {torch::tensor({0.5F, 2.F, -1.F})};
  }
};

// Another factor than was recorded, from call 5 on.
struct Scaled : torch::autograd::Function<Scaled> {
  static float scale;
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x) { return x * 1; }
  static Tensors backward(AutogradContext* /*context*/, const Tensors& gradients) {
    return {gradients[0] * scale};
  }
};
float Scaled::scale = 1;

at::Tensor doubled(const at::Tensor& x) {
  return x * 2;
}
TORCH_LIBRARY(cohort_cpp_gradients, library) {
  library.def("doubled(Tensor x) -> Tensor", &doubled);
}

// An operator of somebody else's library, forward and backward.
struct Foreign : torch::autograd::Function<Foreign> {
  static at::Tensor call(const at::Tensor& x) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("cohort_cpp_gradients::doubled", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x);
  }
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x) { return call(x); }
  static Tensors backward(AutogradContext* /*context*/, const Tensors& gradients) {
    return {call(gradients[0])};
  }
};

using Fn = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& index)>;

// Memory that was just freed holds other numbers.
void litter() {
  std::vector<at::Tensor> blocks;
  for (int size = 1; size <= 64; ++size) blocks.push_back(at::full({size}, 777));
}

// Trains `fn` beside itself in eager mode; says in which call the gradients differ first, 0 for none.
int first_difference(const Fn& fn, bool verify, int calls = 18, const std::function<void(int)>& before = {}) {
  auto fast = script(fn, ScriptOptions().verify(verify).min_operators(0));
  for (int call = 1; call <= calls; ++call) {
    if (before) before(call);
    const at::Tensor x = at::arange(3, at::kFloat) + call, index = (at::arange(3) + call).remainder(3);
    at::Tensor ours = at::ones({3}).requires_grad_(), theirs = at::ones({3}).requires_grad_();
    litter();
    fn(x * theirs, index).sum().backward();
    litter();
    fast(x * ours, index).sum().backward();
    if (!same_bits(ours.grad(), theirs.grad())) return call;
  }
  return 0;
}

TEST(CppGradientsTest, WhatCppFillsIsWhatItFills) {
  const std::vector<std::pair<const char*, Fn>> functions = {
      {"filled", [](const at::Tensor& x, const at::Tensor&) { return Filled::apply(x) * 1.5; }},
      {"filled, gathered",
       [](const at::Tensor& x, const at::Tensor& index) { return Filled::apply(x).gather(0, index) * 1.5; }},
      {"filled, foreign",
       [](const at::Tensor& x, const at::Tensor&) { return Foreign::apply(Filled::apply(x)) * 1.5; }},
      {"filled last",
       [](const at::Tensor& x, const at::Tensor& index) { return Filled::apply(x.gather(0, index)); }},
      {"table", [](const at::Tensor& x, const at::Tensor&) { return Table::apply(x) * 1.5; }},
      {"table, gathered",
       [](const at::Tensor& x, const at::Tensor& index) { return Table::apply(x).gather(0, index) * 1.5; }},
  };
  for (const auto& [name, fn] : functions) {
    for (const bool verify : {true, false}) {
      EXPECT_EQ(first_difference(fn, verify), 0) << name << (verify ? "" : ", not verified");
    }
  }
}

// A backward that changes is found by a verified call, also where it reads indices, draws, or calls an
// operator that may. Calls 5 to 7 are replays.
TEST(CppGradientsTest, ABackwardThatChangesIsFound) {
  const std::vector<std::pair<const char*, Fn>> functions = {
      {"alone", [](const at::Tensor& x, const at::Tensor&) { return Scaled::apply(x) * 1.5; }},
      {"gathered",
       [](const at::Tensor& x, const at::Tensor& index) { return Scaled::apply(x.gather(0, index)) * 1.5; }},
      {"foreign", [](const at::Tensor& x, const at::Tensor&) { return Foreign::apply(Scaled::apply(x)); }},
  };
  for (const auto& [name, fn] : functions) {
    auto fast = script(fn, ScriptOptions().min_operators(0));
    Scaled::scale = 1;
    for (int call = 1; call <= 9; ++call) {
      if (call == 5) Scaled::scale = 10;
      at::Tensor w = at::ones({3}).requires_grad_(), plain = at::ones({3}).requires_grad_();
      const at::Tensor x = at::arange(3, at::kFloat) + call, index = (at::arange(3) + call).remainder(3);
      fn(x * plain, index).sum().backward();
      fast(x * w, index).sum().backward();
      if (call >= 5 && call <= 7) continue;
      EXPECT_TRUE(same_bits(w.grad(), plain.grad())) << name << ", call " << call;
    }
  }
  Scaled::scale = 1;
}

}  // namespace
}  // namespace cohort::script
