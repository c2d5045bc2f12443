#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/dropout.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

// Gradients that arrive in other layouts than they were recorded in.
namespace cohort::script {
namespace {

using test::Body;
using test::contains;
using test::same_bits;

struct NamedLayout {
  const char* name;
  std::function<at::Tensor(const at::Tensor& values)> make;  // may be undefined
};

// Of [2, 3, 4, 5].
const std::vector<NamedLayout> kLayouts = {
    {"dense", [](const at::Tensor& t) { return t.clone(at::MemoryFormat::Contiguous); }},
    {"expanded from a number", [](const at::Tensor& t) { return t.flatten()[0].expand(t.sizes()); }},
    {"expanded along the first dimension",
     [](const at::Tensor& t) { return t.narrow(0, 0, 1).clone().expand(t.sizes()); }},
    {"expanded along the last dimension",
     [](const at::Tensor& t) { return t.narrow(-1, 0, 1).clone().expand(t.sizes()); }},
    {"transposed", [](const at::Tensor& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); }},
    {"channels last", [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); }},
    {"a slice of more", [](const at::Tensor& t) { return at::cat({t, t}, -1).narrow(-1, 1, t.size(-1)); }},
    {"lazily negated", [](const at::Tensor& t) { return t.clone()._neg_view(); }},
    {"lazily negated and expanded",
     [](const at::Tensor& t) { return t.flatten()[1].clone()._neg_view().expand(t.sizes()); }},
    {"lazily conjugated", [](const at::Tensor& t) { return t.clone().conj(); }},
    {"an imaginary part",
     [](const at::Tensor& t) {
       return t.is_complex() ? t.clone().conj() : at::imag(at::complex(t, t + 1).conj());
     }},
    {"undefined", [](const at::Tensor&) { return at::Tensor(); }},
    {"zero, without memory",
     [](const at::Tensor& t) {
       return at::_efficientzerotensor(t.sizes(), t.options().requires_grad(false));
     }},
};

// Two results, so that one of them may be left out.
void expect_orders_alike(const Body& body, at::ScalarType dtype) {
  at::manual_seed(1);
  const auto make_input = [&](int call) {
    at::manual_seed(call);
    return at::randn({2, 3, 4, 5}, dtype).requires_grad_();
  };
  for (const NamedLayout& first : kLayouts) {
    for (const NamedLayout& later : kLayouts) {
      Function fast(body, ScriptOptions().min_operators(0));
      for (int call = 0; call < 9; ++call) {
        SCOPED_TRACE(std::string(first.name) + ", then " + later.name + ", call " + std::to_string(call));
        const NamedLayout& now = call < 3 || call == 7 ? first : later;
        const auto gradients = [&](const Body& run) {
          const at::Tensor x = make_input(call);
          const Tensors results = run({x});
          Tensors roots, grad_outputs;
          for (std::size_t i = 0; i < results.size(); ++i) {
            at::manual_seed(call + 50);
            at::Tensor grad_output = (i == 0 ? now : kLayouts[0]).make(at::randn_like(results[i].detach()));
            if (!grad_output.defined()) continue;
            roots.push_back(results[i]);
            grad_outputs.push_back(grad_output);
          }
          return torch::autograd::grad(roots, {x}, grad_outputs);
        };
        const at::Tensor expected = gradients(body)[0], found = gradients(std::ref(fast))[0];
        ASSERT_TRUE(at::allclose(expected, found, 1e-6, 1e-6)) << fast.explain();
        // A gradient in other strides is copied into those that were recorded: kernels may round differently.
        ASSERT_TRUE(&now != &first || same_bits(expected, found)) << fast.explain();
      }
    }
  }
}

TEST(GradOutputsTest, OfRealResultsMayFollowEachOtherInAnyLayout) {
  expect_orders_alike([](const Tensors& in) { return Tensors{in[0].mul(2).exp(), in[0].sin() * 3}; },
                      at::kFloat);
}

TEST(GradOutputsTest, OfResultsThatAreViewsMayFollowEachOtherInAnyLayout) {
  expect_orders_alike(
      [](const Tensors& in) {
        const at::Tensor y = in[0] * in[0];
        return Tensors{y.transpose(0, 3).contiguous().transpose(0, 3), y.view({2, 3, 4, 5})};
      },
      at::kDouble);
}

TEST(GradOutputsTest, OfComplexResultsMayFollowEachOtherInAnyLayout) {
  expect_orders_alike(
      [](const Tensors& in) {
        return Tensors{in[0].mul(2).mul(in[0]), in[0] * c10::complex<float>(0.5F, 1)};
      },
      at::kComplexFloat);
}

TEST(GradOutputsTest, OfResultsThatAreHandedThroughMayFollowEachOtherInAnyLayout) {
  expect_orders_alike([](const Tensors& in) { return Tensors{in[0] + 0.5, in[0].neg()}; }, at::kFloat);
  expect_orders_alike([](const Tensors& in) { return Tensors{in[0].conj() * 1, in[0].neg()}; },
                      at::kComplexFloat);
}

// y.sum() hands an expanded gradient on, (y * w).sum() a dense one.
TEST(GradOutputsTest, ANewLossAfterTheSameFunction) {
  const at::Tensor w = at::rand({2, 3}).requires_grad_(), weight = at::rand({2, 3});
  const auto fn = [=](const at::Tensor& x) { return (x * w).exp().mul(w); };
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> losses = {
      [](const at::Tensor& y) { return y.sum(); },
      [=](const at::Tensor& y) { return (y * weight).sum(); },
      [](const at::Tensor& y) { return y.mean(0).square().sum(); },
      [](const at::Tensor& y) { return y.t().contiguous().view({-1}).cumsum(0).sum(); },
      [](const at::Tensor& y) { return y[1][2] * 3; },
      [](const at::Tensor& y) { return at::imag(at::complex(y, y * 2).conj()).sum(); },
      [](const at::Tensor& y) { return y.max(); },
  };
  for (std::size_t first = 0; first < losses.size(); ++first) {
    for (std::size_t later = 0; later < losses.size(); ++later) {
      auto fast = script(fn);
      for (int call = 0; call < 8; ++call) {
        SCOPED_TRACE(std::to_string(first) + ", then " + std::to_string(later) + ", call " +
                     std::to_string(call));
        const auto& loss = losses[call < 3 ? first : later];
        const at::Tensor x = at::full({2, 3}, 0.1 * (call + 1));
        ASSERT_TRUE(
            same_bits(torch::autograd::grad({loss(fn(x))}, {w}), torch::autograd::grad({loss(fast(x))}, {w})))
            << fast.explain();
      }
      EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
    }
  }
}

// An embedding whose gradient is sparse, and one whose gradient is dense, look up in what the function
// returns.
TEST(GradOutputsTest, SparseAndDenseOnesMayFollowEachOther) {
  const auto fn = [](const at::Tensor& w) { return (w * 3).sin() * w; };
  const at::Tensor indices = torch::tensor({1, 2, 2}, at::kLong);
  for (const unsigned sparse_calls : {0b101010101010U, 0b111111111111U, 0b111111000000U, 0b000000111111U}) {
    auto fast = script(fn, ScriptOptions().min_operators(0));
    for (unsigned call = 0; call < 12; ++call) {
      const auto gradient = [&](auto& run, bool sparse) {
        const at::Tensor w = at::linspace(0.1, 1.5 + call, 12).view({4, 3}).requires_grad_();
        at::embedding(run(w), indices, -1, false, sparse).sum().backward();
        return w.grad().to_dense();
      };
      const bool is_sparse = (sparse_calls >> call & 1) != 0;
      ASSERT_TRUE(same_bits(gradient(fn, false), gradient(fast, is_sparse)))
          << sparse_calls << ", call " << call << "\n"
          << fast.explain();
    }
    EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
  }
}

TEST(GradOutputsTest, AfterASparseOneGradientsAreDenseInEveryCallAndEachTimeBackwardRuns) {
  const at::Tensor indices = torch::tensor({1, 2, 2}, at::kLong);
  auto fast = script([](const at::Tensor& w) { return (w * 3).sin() * w; }, ScriptOptions().min_operators(0));
  for (int call = 0; call < 12; ++call) {
    const at::Tensor w = at::linspace(0.1, 1.5 + call, 12).view({4, 3}).requires_grad_();
    std::vector<at::Layout> layouts;
    w.register_hook([&](const at::Tensor& gradient) { layouts.push_back(gradient.layout()); });
    const at::Tensor loss =
        (at::embedding(fast(w), indices, -1, false, true) * at::linspace(1, 2, 9).view({3, 3})).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor once = w.grad().clone();
    loss.backward();
    EXPECT_EQ(layouts, (std::vector<at::Layout>{at::kStrided, at::kStrided})) << call;
    EXPECT_TRUE(same_bits(once + once, w.grad())) << call;
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

// Zeros that a gradient gets where it is spread out are no numbers that eager mode multiplies by inf.
TEST(GradOutputsTest, ZerosThatAreNotInAGradientMeetInfinity) {
  using Loss = std::function<at::Tensor(const at::Tensor&)>;
  const at::Tensor second_row = torch::tensor({1}), weight = at::ones({2, 2});
  const std::vector<std::pair<std::string, Loss>> losses = {
      {"sgn", [](const at::Tensor& y) { return y.sgn().sum(); }},
      {"sparse", [=](const at::Tensor& y) { return at::embedding(y, second_row, -1, false, true).sum(); }},
  };
  const std::vector<std::pair<std::string, Loss>> bodies = {
      {"sqrt", [](const at::Tensor& w) { return (w * 2).sqrt(); }},
      {"rsqrt", [](const at::Tensor& w) { return (w * 2).rsqrt(); }},
      {"reciprocal", [](const at::Tensor& w) { return (w * 2).reciprocal(); }},
      {"pow", [](const at::Tensor& w) { return (w * 2).pow(-1); }},
  };
  const at::Tensor start = torch::tensor({{0.F, 0.F}, {1.F, 2.F}});
  const auto gradient_of = [&](const Loss& body, const Loss& loss, bool is_twice = false) {
    const at::Tensor w = start.clone().requires_grad_();
    const at::Tensor out = loss(body(w));
    Tensors found;
    if (is_twice) found.push_back(torch::autograd::grad({out}, {w}, {}, /*retain_graph=*/true)[0]);
    found.push_back(torch::autograd::grad({out}, {w})[0]);
    for (at::Tensor& gradient : found) gradient = at::zeros_like(w) + gradient;
    return at::stack(found);
  };
  for (const auto& [body_name, body] : bodies) {
    for (const auto& [loss_name, loss] : losses) {
      if (loss_name == "sparse" && body_name == "sqrt")
        continue;  // LibTorch does not divide a sparse gradient
      for (int first = 0; first < 8; ++first) {
        auto fast = script(body, ScriptOptions().min_operators(0));
        int errors = 0;
        for (int call = 0; call < 12; ++call) {
          SCOPED_TRACE(body_name + ", " + loss_name + " from " + std::to_string(first) + " on, call " +
                       std::to_string(call));
          const Loss dense = [&](const at::Tensor& y) { return (y[1] * weight[1]).sum(); };
          const Loss& now = call < first ? dense : loss;
          try {
            const at::Tensor found = gradient_of(std::ref(fast), now, call % 3 == 2);
            ASSERT_TRUE(same_bits(gradient_of(body, now, call % 3 == 2), found)) << fast.explain();
          } catch (const UsageError& error) {
            ASSERT_TRUE(contains(error.what(), "gradients computed from it are not finite")) << error.what();
            ++errors;
          }
        }
        EXPECT_LE(errors, 1) << body_name << ", " << loss_name << " from " << first << " on";
      }
    }
  }
}

// sgn() hands zeros without memory on to what is before it.
TEST(GradOutputsTest, OfSgnAfterTheFunctionIsThatOfEagerMode) {
  const auto fn = [](const at::Tensor& x) { return (x * 2).sin() * x; };
  auto fast = script(fn, ScriptOptions().min_operators(0));
  for (int call = 0; call < 12; ++call) {
    const auto gradient = [&](auto& run, bool with_more) {
      const at::Tensor x = at::linspace(-1, 1.5 + call, 6).requires_grad_();
      const at::Tensor y = run(x);
      (with_more ? y.sgn().sum() + y.exp().sum() : y.sgn().sum()).backward();
      return x.grad().clone();  // eager mode's may have no memory, ours may be -0
    };
    const bool with_more = call % 3 == 2;
    ASSERT_TRUE(at::equal(gradient(fn, with_more), gradient(fast, with_more))) << call << fast.explain();
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(GradOutputsTest, OfAResultWithoutDimensionsMayFollowEachOtherInAnyLayout) {
  const auto fn = [](const at::Tensor& x) { return x.sin().sum() * 2; };
  const std::vector<std::function<at::Tensor()>> grad_outputs = {
      [] { return at::ones({}); },
      [] { return at::full({}, 3.0)._neg_view(); },
      [] { return at::arange(4.0).to(at::kFloat)[2]; },
      [] { return at::Tensor(); },
  };
  for (std::size_t first = 0; first < grad_outputs.size(); ++first) {
    for (const auto& later : grad_outputs) {
      auto fast = script(fn);
      for (int call = 0; call < 8; ++call) {
        const at::Tensor grad_output = (call < 3 ? grad_outputs[first] : later)();
        const auto gradient = [&](const at::Tensor& x, const at::Tensor& y) {
          y.backward(grad_output);
          return x.grad();
        };
        const at::Tensor x = at::ones({3}).requires_grad_(), z = at::ones({3}).requires_grad_();
        ASSERT_TRUE(same_bits(gradient(x, fn(x)), gradient(z, fast(z)))) << call << fast.explain();
      }
    }
  }
}

// Losses of sums, whose gradients are expanded, and then one that is not. `between`: after forward.
void expect_losses_alike(
    const std::function<at::Tensor(const at::Tensor&)>& fn, const std::function<void()>& start,
    const std::function<void()>& between = [] {}) {
  const at::Tensor c = at::arange(1, 9, at::kFloat).sin();
  const auto run = [&](bool is_scripted) {
    start();
    at::manual_seed(3);
    auto fast = script(fn);
    Tensors seen;
    for (int call = 0; call < 9; ++call) {
      at::Tensor x = at::arange(8, at::kFloat) * 0.1 + call;
      x.requires_grad_();
      const at::Tensor y = is_scripted ? fast(x) : fn(x);
      between();
      (call < 5 ? y.sum() : (y * c).sum()).backward();
      seen.insert(seen.end(), {y.detach(), x.grad(), at::rand({2})});
    }
    return seen;
  };
  const Tensors expected = run(false), found = run(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::allclose(expected[i], found[i])) << i;
}

TEST(GradOutputsTest, WhatForwardReadsAndWritesIsReadOnce) {
  at::Tensor state;
  expect_losses_alike(
      [&](const at::Tensor& x) {
        const at::Tensor before = state * 1;
        state.add_(1);
        return x * before * 2;
      },
      [&] { state = at::ones({8}); });
}

TEST(GradOutputsTest, ForwardUnderAutocastHasItsGradientsOutsideOfIt) {
  const at::Tensor w = at::arange(64, at::kFloat).view({8, 8}).sin();
  expect_losses_alike(
      [&](const at::Tensor& x) {
        const optim::Autocast autocast(at::kCPU, at::kBFloat16);
        return at::mv(w, x).to(at::kFloat).tanh() * 2;
      },
      [] {});
  Function fast([&](const Tensors& in) { return Tensors{at::mm(in[0], w).tanh() * 2}; },
                ScriptOptions().min_operators(0));
  const at::Tensor c = at::arange(1, 9, at::kFloat).sin().view({1, 8});
  for (int call = 0; call < 8; ++call) {
    at::Tensor gradients[2];
    for (const bool is_scripted : {false, true}) {
      const at::Tensor x = (at::arange(8, at::kFloat).view({1, 8}) * 0.1).requires_grad_();
      at::Tensor y;
      {
        const optim::Autocast autocast(at::kCPU, at::kBFloat16);
        y = is_scripted ? fast({x})[0] : at::mm(x, w).tanh() * 2;
      }
      (call < 5 ? y.sum() : (y * c.to(y.scalar_type())).sum()).backward();
      gradients[is_scripted ? 1 : 0] = x.grad();
    }
    EXPECT_TRUE(at::allclose(gradients[0], gradients[1])) << call;
  }
}

TEST(GradOutputsTest, AModuleThatChangedItsModeSinceForwardIsAnError) {
  torch::nn::Dropout layer(0.5);
  auto fast = script([&](const at::Tensor& x) { return layer->forward(x) * 2; },
                     ScriptOptions().modules({layer.ptr()}));
  for (int call = 0; call < 5; ++call) fast(at::ones({8}).requires_grad_()).sum().backward();
  const at::Tensor x = at::ones({8}).requires_grad_(), y = fast(x);
  layer->eval();
  COHORT_EXPECT_THROW_WITH((y * at::arange(8)).sum().backward(), UsageError, "a module's mode was changed");
}

}  // namespace
}  // namespace cohort::script
