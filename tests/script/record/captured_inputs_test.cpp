#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cohort/script/script.h"
#include "tests/script/like_eager.h"

// An input that is also captured, or shares memory with what is, in some calls.
namespace cohort::script {
namespace {

using test::litter;
using test::same_bits;

struct StatefulNetImpl : torch::nn::Module {
  StatefulNetImpl() {
    state = register_buffer("state", at::ones({3}));
    weight = register_parameter("weight", at::full({3}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) { return (x * weight + state).exp(); }
  at::Tensor state, weight;
};
TORCH_MODULE(StatefulNet);

// Calls a net and its script on what `input` says.
void expect_like_eager(const std::function<at::Tensor(StatefulNet net, int call)>& input) {
  for (const bool has_gradients : {false, true}) {
    const at::AutoGradMode mode(has_gradients);
    StatefulNet net;
    auto fast = script(net);
    for (int call = 0; call < 10; ++call) {
      const at::Tensor x = input(net, call);
      litter();
      const at::Tensor expected = net->forward(x), found = fast(x);
      ASSERT_TRUE(same_bits(expected, found)) << call << fast.explain();
      if (!has_gradients) continue;
      ASSERT_TRUE(same_bits(torch::autograd::grad({expected.sum()}, {net->weight}),
                            torch::autograd::grad({found.sum()}, {net->weight})))
          << call << fast.explain();
    }
  }
}

TEST(CapturedInputsTest, ABufferOfTheModuleIsAnInputInTheFirstCalls) {
  expect_like_eager([](StatefulNet net, int call) { return call < 3 ? net->state : at::full({3}, -1.0); });
  expect_like_eager(
      [](StatefulNet net, int call) { return call < 5 ? net->state.view({3}) : at::full({3}, -1.0); });
  expect_like_eager(
      [](StatefulNet net, int call) { return call < 5 ? net->state.detach() : at::full({3}, -1.0 * call); });
}

TEST(CapturedInputsTest, CallsWithABufferOfTheModuleAreCounted) {
  StatefulNet net;
  auto fast = script(net);
  const at::NoGradGuard no_grad;
  for (int call = 0; call < 4; ++call) fast(net->state);
  EXPECT_NE(fast.explain().find("4 calls ran the function itself: an input is a parameter or buffer"),
            std::string::npos)
      << fast.explain();
}

TEST(CapturedInputsTest, ABufferOfTheModuleIsAnInputInLaterCalls) {
  expect_like_eager(
      [](StatefulNet net, int call) { return call >= 4 ? net->state : at::full({3}, 1.0 + call); });
  expect_like_eager(
      [](StatefulNet net, int call) { return call % 2 == 1 ? net->state : at::full({3}, 1.0 + call); });
}

// What it writes to its input is then written to the buffer, with a history that its parameters see.
TEST(CapturedInputsTest, ABufferThatIsAnInputIsWrittenToWithGradients) {
  struct WriterImpl : torch::nn::Module {
    WriterImpl() {
      state = register_buffer("state", at::ones({3}));
      weight = register_parameter("weight", at::full({3}, 0.5));
    }
    at::Tensor forward(const at::Tensor& x) {
      x.mul_(weight);
      return (state.sigmoid() * x).sum();
    }
    at::Tensor state, weight;
  };
  for (const bool is_first : {false, true}) {
    const auto ours = std::make_shared<WriterImpl>(), theirs = std::make_shared<WriterImpl>();
    auto fast = script([net = theirs](const at::Tensor& x) { return net->forward(x); },
                       ScriptOptions().min_operators(0).modules({theirs}));
    for (int call = 0; call < 12; ++call) {
      const bool is_buffer = is_first ? call < 5 : call >= 4 && call % 2 == 0;
      const auto gradient = [&](WriterImpl& net, auto run) {
        net.state.detach_().fill_(1.0 + call);
        net.weight.mutable_grad().reset();
        at::Tensor x = is_buffer ? net.state : at::full({3}, 2.0 + call);
        run(x).backward();
        return net.weight.grad();
      };
      const at::Tensor expected = gradient(*ours, [&](const at::Tensor& x) { return ours->forward(x); });
      ASSERT_TRUE(same_bits(expected, gradient(*theirs, [&](const at::Tensor& x) { return fast(x); })))
          << call << fast.explain();
    }
  }
}

TEST(CapturedInputsTest, AParameterOfTheModuleIsAnInputInSomeCalls) {
  expect_like_eager(
      [](StatefulNet net, int call) { return call < 3 ? net->weight.detach() : at::full({3}, -1.0); });
  expect_like_eager(
      [](StatefulNet net, int call) { return call >= 4 ? net->weight.detach() : at::full({3}, -1.0); });
  expect_like_eager([](StatefulNet net, int call) {
    return call < 3 ? net->weight : at::full({3}, -1.0).requires_grad_();
  });
}

// A function that writes to what it captured; the input may lie in the same memory.
void expect_effects_like_eager(const std::function<at::Tensor(const at::Tensor& x, at::Tensor state)>& fn,
                               const std::function<at::Tensor(const at::Tensor& state, int call)>& input) {
  const at::NoGradGuard no_grad;
  const at::Tensor ours = at::arange(4, at::kFloat), theirs = at::arange(4, at::kFloat);
  auto fast = script([=](const at::Tensor& x) { return fn(x, theirs); });
  for (int call = 0; call < 10; ++call) {
    litter();
    const at::Tensor expected = fn(input(ours, call), ours), found = fast(input(theirs, call));
    ASSERT_TRUE(same_bits(expected, found)) << call << fast.explain();
    ASSERT_TRUE(same_bits(ours, theirs)) << call << fast.explain();
  }
}

TEST(CapturedInputsTest, AStateThatTheFunctionWritesIsAnInputInSomeCalls) {
  const auto write_first = [](const at::Tensor& x, at::Tensor state) {
    state.mul_(0.5);
    return (x * 2).exp() + state;
  };
  const auto write_last = [](const at::Tensor& x, at::Tensor state) {
    const at::Tensor y = (x + 1).sin();
    state.add_(y);
    return y + x;
  };
  const auto read_often = [](const at::Tensor& x, at::Tensor state) {
    const at::Tensor y = x * 2, z = state * 3;
    state.copy_(y + 0.25);
    return y + z + x;
  };
  const std::vector<std::function<at::Tensor(const at::Tensor&, int)>> inputs = {
      [](const at::Tensor& state, int call) { return call >= 4 ? state : at::full({4}, 0.1 * call); },
      [](const at::Tensor& state, int call) {
        return call % 3 == 2 ? state.view({4}) : at::full({4}, 0.1 * call);
      },
      [](const at::Tensor& state, int call) {
        return call >= 4 ? state[call % 4].expand({4}).clone() : state.clone();
      },
      [](const at::Tensor& state, int call) { return call >= 5 ? state.view({4}).detach() : state.clone(); },
  };
  for (const auto& input : inputs) {
    expect_effects_like_eager(write_first, input);
    expect_effects_like_eager(write_last, input);
    expect_effects_like_eager(read_often, input);
  }
}

TEST(CapturedInputsTest, AModulesParameterThatIsUsedThroughItsDataIsReplaced) {
  struct Impl : torch::nn::Module {
    Impl() {
      weight = register_parameter("weight", at::ones({2})), state = register_buffer("state", at::ones({2}));
    }
    at::Tensor forward(const at::Tensor& x) { return x * weight.data() + state.data(); }
    at::Tensor weight, state;
  };
  const at::NoGradGuard no_grad;
  const auto net = std::make_shared<Impl>();
  auto fast = script(net);
  for (int call = 0; call < 12; ++call) {
    if (call == 5) net->weight.set_data(at::full({2}, 10.0));
    if (call == 8) net->state.set_data(at::full({2}, 20.0));
    const at::Tensor x = at::full({2}, 1.0 + call);
    EXPECT_TRUE(same_bits(net->forward(x), fast(x))) << call << fast.explain();
  }
}

TEST(CapturedInputsTest, AModulesParameterAsAnInputLeavesOtherInputsTheirProgram) {
  const at::NoGradGuard no_grad;
  torch::nn::Linear net(4, 4);
  int ran = 0;
  auto fast = script(
      [&](const at::Tensor& x) {
        ++ran;
        return net->forward(x).tanh();
      },
      ScriptOptions().verify(false).modules({net.ptr()}));
  for (int call = 0; call < 20; ++call) {
    const at::Tensor x = at::full({4, 4}, 0.1 * call);
    EXPECT_TRUE(same_bits(fast(net->weight), net->forward(net->weight).tanh()));
    EXPECT_TRUE(same_bits(fast(x), net->forward(x).tanh()));
  }
  EXPECT_LE(ran, 20 + 4) << fast.explain();
}

// No module says that the function uses it too.
TEST(CapturedInputsTest, ATensorThatALambdaUsesIsItsInputInTheFirstCalls) {
  for (const bool has_gradients : {false, true}) {
    const at::AutoGradMode mode(has_gradients);
    for (int first_other = 1; first_other < 12; ++first_other) {
      for (const bool writes : {false, true}) {
        const auto run = [&](bool is_scripted) {
          const at::Tensor state = at::full({3}, 0.5), other = at::ones({3});
          const auto fn = [=](const at::Tensor& x, const at::Tensor& y) {
            const at::Tensor seen = (x * state + y).exp();
            if (writes) at::Tensor(state).add_(y, 0.1);
            return seen * state;
          };
          auto fast = script(fn, ScriptOptions().min_operators(0));
          Tensors seen;
          for (int call = 0; call < 20; ++call) {
            const at::Tensor x = call < first_other ? state : at::full({3}, -0.1 * call);
            const at::Tensor y = call < 2 * first_other ? other : at::full({3}, 0.1 * call);
            litter();
            seen.push_back(is_scripted ? fast(x, y) : fn(x, y));
            seen.push_back(state.clone());
          }
          return seen;
        };
        EXPECT_TRUE(same_bits(run(false), run(true))) << has_gradients << first_other << writes;
      }
    }
  }
}

// What the first other input is: one call that verifies may show nothing yet.
TEST(CapturedInputsTest, ATensorThatALambdaUsesIsFollowedByOthersOfAnyKind) {
  const at::Tensor table = at::rand({40, 3});
  const std::vector<std::pair<const char*, std::function<at::Tensor(int call)>>> inputs = {
      {"another row of the same memory", [=](int call) { return table[call]; }},
      {"the same numbers, and then others",
       [=](int call) { return call < 12 ? table[0].clone() : table[call] * 1; }},
      {"zeros, and then others", [=](int call) { return call < 12 ? at::zeros({3}) : table[call] * 1; }},
  };
  for (const auto& [name, other] : inputs) {
    for (const bool has_gradients : {false, true}) {
      for (const int throws_at : {-1, 9}) {
        const at::AutoGradMode mode(has_gradients);
        const at::Tensor anchor = table[0], weight = at::rand({3}).requires_grad_();
        int now = 0;
        const auto fn = [&](const at::Tensor& x) {
          if (now == throws_at) throw std::runtime_error("thrown by the function");
          return ((x - anchor) * weight).exp() + x * anchor;
        };
        auto fast = script(fn, ScriptOptions().min_operators(0));
        for (int call = 0; call < 30; ++call) {
          now = call;
          const at::Tensor x = call < 9 ? table[0] : other(call);
          if (call == throws_at) {
            test::error_of([&] { fast(x); });
            continue;
          }
          litter();
          const at::Tensor expected = fn(x), found = fast(x);
          ASSERT_TRUE(same_bits(expected, found)) << name << call << has_gradients << fast.explain();
          if (has_gradients && call < 9) found.sum().backward();  // and then forward alone
        }
      }
    }
  }
}

TEST(CapturedInputsTest, ATensorWhoseDataALambdaUsesGetsOtherMemory) {
  const at::NoGradGuard no_grad;
  const at::Tensor w = at::ones({3}), v = at::ones({3});
  const std::vector<std::pair<std::function<at::Tensor(const at::Tensor&)>, bool>> functions = {
      {[=](const at::Tensor& x) { return (x * w.data()).exp(); }, false},
      {[=](const at::Tensor& x) { return (x * w.data()[1] + v).exp(); }, false},
      {[=](const at::Tensor& x) { return (x * w.data() + w).exp(); }, false},
      {[=](const at::Tensor& x) { return (x * w.detach() + v.view({3})).exp(); }, true},
  };
  for (std::size_t i = 0; i < functions.size(); ++i) {
    for (int changes = 2; changes < 9; ++changes) {
      w.set_data(at::ones({3}));
      auto fast = script(functions[i].first, ScriptOptions().min_operators(0));
      for (int call = 0; call < 10; ++call) {
        if (call == changes) w.set_data(at::full({3}, 5.0));
        const at::Tensor x = at::full({3}, 0.1 * call);
        litter();
        ASSERT_TRUE(same_bits(functions[i].first(x), fast(x))) << i << changes << call << fast.explain();
      }
      const bool is_replayed = fast.explain().find("program: ") != std::string::npos;
      EXPECT_TRUE(is_replayed || !functions[i].second || changes > 6) << i << fast.explain();
    }
  }
}

TEST(CapturedInputsTest, ATensorThatIsDetachedBetweenCallsIsTheSame) {
  at::Tensor state = at::ones({3});
  auto fast =
      script([&](const at::Tensor& x) { return (x * state).exp(); }, ScriptOptions().min_operators(0));
  for (int call = 0; call < 20; ++call) {
    EXPECT_TRUE(same_bits(fast(at::ones({3})), state.exp()));
    state.add_(0.1);
    state = state.detach();
  }
  EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
}

}  // namespace
}  // namespace cohort::script
