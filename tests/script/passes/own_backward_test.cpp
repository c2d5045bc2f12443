// Backwards that are the user's own, and what else only eager mode knows: replays have its numbers, or leave
// the call to it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "cohort/ops/operator.h"
#include "cohort/script/script.h"
#include "tests/script/same_bits.h"

namespace cohort::script {
namespace {

using test::same_bits;
using Tensors = std::vector<at::Tensor>;
using torch::autograd::AutogradContext;

// Adds to the gradient whatever comes: zeros for a result that the loss does not use would not be nothing.
struct Penalty : torch::autograd::Function<Penalty> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.clone();
  }
  static Tensors backward(AutogradContext* context, Tensors gradients) {
    return {gradients[0] + 0.1 * context->get_saved_variables()[0].sign()};
  }
};

TEST(OwnBackwardTest, RunsOnlyWhereTheLossComesFromItsResult) {
  for (const bool may_run_again : {true, false}) {
    const at::Tensor w = at::ones({3}).requires_grad_(), count = at::zeros({});
    const auto body = [&](const at::Tensor& x) {
      if (!may_run_again) count.add_(1);
      const at::Tensor h = x * w;
      return Tensors{(h * h).sum(), Penalty::apply(h * 2).sum()};
    };
    auto fast = script(body);
    for (int call = 0; call < 34; ++call) {
      const at::Tensor x = at::full({3}, call + 1.0);
      const auto gradient = [&](auto& function) {
        return torch::autograd::grad({function(x)[static_cast<std::size_t>(call % 2)]}, {w})[0];
      };
      ASSERT_TRUE(same_bits(gradient(fast), gradient(body))) << call << "\n" << fast.explain();
    }
  }
}

TEST(OwnBackwardTest, AfterAllResultsItIsReplayed) {
  const at::Tensor w = at::ones({3}).requires_grad_();
  const auto body = [&](const at::Tensor& x) {
    const at::Tensor h = Penalty::apply(x * w);
    return Tensors{h.sum(), (h * 3).exp().sum()};
  };
  auto fast = script(body);
  for (int call = 0; call < 12; ++call) {
    const at::Tensor x = at::full({3}, 0.1 * (call + 1));
    const auto gradient = [&](auto& function) {
      return torch::autograd::grad({function(x)[static_cast<std::size_t>(call % 2)]}, {w})[0];
    };
    ASSERT_TRUE(same_bits(gradient(fast), gradient(body))) << call << "\n" << fast.explain();
  }
  EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
}

// The gradient is made in forward, and handed out as it is: autograd adds to it in place.
struct Fused : torch::autograd::Function<Fused> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x * 2 + 1});
    return (x * x + x).sum();
  }
  static Tensors backward(AutogradContext* context, Tensors /*gradients*/) {
    return {context->get_saved_variables()[0]};
  }
};

TEST(OwnBackwardTest, ASecondBackwardReadsWhatForwardSaved) {
  const at::Tensor w = at::ones({3}).requires_grad_();
  const auto body = [&](const at::Tensor& x) {
    const at::Tensor h = x * w;
    return Fused::apply(h) + (h * 3).sum();
  };
  for (const bool verify : {true, false}) {
    auto fast = script(body, ScriptOptions().verify(verify));
    for (int call = 0; call < 8; ++call) {
      const at::Tensor x = at::full({3}, call + 1.0);
      const auto gradients = [&](auto& function) {
        const at::Tensor loss = function(x);
        if (call < 4) return torch::autograd::grad({loss}, {w})[0];
        const at::Tensor first = torch::autograd::grad({loss}, {w}, {}, /*retain_graph=*/true)[0].clone();
        return at::stack({first, torch::autograd::grad({loss}, {w}, {}, /*retain_graph=*/true)[0]});
      };
      ASSERT_TRUE(same_bits(gradients(fast), gradients(body))) << call << "\n" << fast.explain();
    }
  }
}

TEST(OwnBackwardTest, AGraphThatTheFunctionMakesUnderNoGradIsTheResults) {
  const at::Tensor w = at::ones({3}).requires_grad_(), v = at::ones({}).requires_grad_();
  const auto body = [&](const at::Tensor& x) {
    const at::AutoGradMode on(true);
    return (x * w).sum() * 2;
  };
  auto fast = script(body);
  for (int call = 0; call < 8; ++call) {
    const at::Tensor x = at::full({3}, call + 1.0);
    const auto gradient = [&](auto& function) {
      at::Tensor y;
      {
        const at::NoGradGuard no_grad;
        y = function(x);
      }
      return torch::autograd::grad({y + v}, {w, v}, {}, {}, false, /*allow_unused=*/true)[0];
    };
    ASSERT_TRUE(same_bits(gradient(fast), gradient(body))) << call;
  }
}

TEST(OwnBackwardTest, AnInputMayBeUndefined) {
  const auto body = [](const at::Tensor& x, const at::Tensor& mask) {
    return mask.defined() ? (x * mask).exp() * 2 : x.exp() * 2;
  };
  for (const bool gradients : {false, true}) {
    auto fast = script(body);
    const at::AutoGradMode mode(gradients);
    for (int call = 0; call < 12; ++call) {
      const at::Tensor x = at::full({3}, 0.1 * call).requires_grad_(gradients);
      const at::Tensor mask = call % 3 == 2 ? at::full({3}, 2.0) : at::Tensor();
      const at::Tensor found = fast(x, mask), want = body(x, mask);
      ASSERT_TRUE(same_bits(found, want)) << call;
      if (!gradients) continue;
      const auto gradient = [&](const at::Tensor& y) { return torch::autograd::grad({y.sum()}, {x})[0]; };
      ASSERT_TRUE(same_bits(gradient(found), gradient(want))) << call;
    }
    EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
  }
}

struct BufferedImpl : torch::nn::Module {
  BufferedImpl() { buffer = register_buffer("buffer", at::ones({4})); }
  at::Tensor forward(const at::Tensor& x) { return x * buffer.data() + 1; }
  at::Tensor buffer;
};
TORCH_MODULE(Buffered);

TEST(OwnBackwardTest, ABufferThatIsUsedThroughItsDataGetsOtherMemory) {
  const at::NoGradGuard no_grad;
  Buffered net;
  auto fast = script(net);
  for (int call = 0; call < 10; ++call) {
    if (call == 5) net->buffer.set_data(at::full({4}, 5.0));
    const at::Tensor x = at::full({4}, call + 1.0);
    ASSERT_TRUE(same_bits(fast(x), net->forward(x))) << call;
  }
}

// A view whose place depends on a value.
at::Tensor window(const at::Tensor& x, const at::Tensor& start) {
  return x.as_strided({2}, {1}, x.storage_offset() + start.item<std::int64_t>());
}
TORCH_LIBRARY(own_backward_test, m) {
  cohort::ops::define(m, "window(Tensor(a) x, Tensor start) -> Tensor(a)").composite(&window);
}

TEST(OwnBackwardTest, AViewOfTheUsersOwnIsMadeInEachReplay) {
  const at::NoGradGuard no_grad;
  static const auto op =
      cohort::ops::find<at::Tensor(const at::Tensor&, const at::Tensor&)>("own_backward_test::window");
  const auto body = [](const at::Tensor& x, const at::Tensor& start) { return op.call(x, start) * 2 + 1; };
  for (const bool verify : {true, false}) {
    auto fast = script(body, ScriptOptions().verify(verify));
    for (int call = 0; call < 20; ++call) {
      const at::Tensor x = at::arange(8.0) + call, start = at::full({}, call < 4 ? 0 : call % 5, at::kLong);
      ASSERT_TRUE(same_bits(fast(x, start), body(x, start))) << call << "\n" << fast.explain();
    }
  }
}

}  // namespace
}  // namespace cohort::script
