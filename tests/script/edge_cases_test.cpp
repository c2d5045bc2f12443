#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorIndexing.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/optim/autocast.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/internal/record/recorder.h"
#include "cohort/script/step.h"
#include "like_eager.h"
#include "nets.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

// Functions and loops that a recording might get wrong: whatever script mode does with them, results, effects
// and gradients are eager mode's, or an error.
namespace cohort::script {
namespace {

namespace nn = torch::nn;
using test::contains;
using test::cross_entropy;
using test::same_bits;

// Calls `run` and its script in turn, each on inputs made anew, and expects the same results and the same
// effects on the inputs. Returns explain().
std::string expect_same(const Function::Run& run, const std::function<Tensors(int call)>& inputs,
                        int calls = 6) {
  Function fast(run, ScriptOptions().min_operators(0));
  for (int i = 0; i < calls; ++i) {
    const Tensors ours = inputs(i), theirs = inputs(i);
    at::manual_seed(i);
    const Tensors expected = run(ours);
    at::manual_seed(i);
    const Tensors found = fast(theirs);
    EXPECT_TRUE(same_bits(expected, found)) << "call " << i << "\n" << fast.explain();
    EXPECT_TRUE(same_bits(ours, theirs)) << "call " << i << "\n" << fast.explain();
  }
  return fast.explain();
}

TEST(EdgeCasesTest, InputsThatOverlapAreWrittenAsInEagerMode) {
  const at::NoGradGuard no_grad;
  const auto run = [](const Tensors& in) {
    in[0].add_(1);
    in[1].mul_(2);
    in[0].slice(0, 1, 3).zero_();
    return Tensors{in[0] + in[1]};
  };
  const auto overlapping = [](int call) {
    const at::Tensor memory = at::arange(12, at::kFloat);
    const std::int64_t start = call % 2, shift = call < 8 ? 2 : 3;
    return Tensors{memory.slice(0, start, start + 5), memory.slice(0, start + shift, start + shift + 5)};
  };
  const std::string explained = expect_same(run, overlapping, 16);
  EXPECT_TRUE(contains(explained, "2 of 8 programs")) << explained;
}

TEST(EdgeCasesTest, InputsMayBeAnyViewOfAnything) {
  const at::NoGradGuard no_grad;
  const auto run = [](const Tensors& in) {
    const at::Tensor y = in[0] * 2;
    return Tensors{y, at::real(y).contiguous(), in[0].t().contiguous(), y.abs()};
  };
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> views = {
      [](const at::Tensor& t) { return t; },
      [](const at::Tensor& t) { return t.t(); },
      [](const at::Tensor& t) { return t.conj(); },
      [](const at::Tensor& t) { return t.slice(1, 1, 4); },
      [](const at::Tensor& t) { return t[1].expand({3, 4}); },
      [](const at::Tensor& t) { return at::imag(t.conj()); },  // a negative view
  };
  for (const auto& view : views) {
    const auto make = [&](int call) {
      at::manual_seed(call);
      return Tensors{view(at::randn({4, 4}, at::kComplexFloat))};
    };
    const auto run_real = [&](const Tensors& in) {
      return in[0].is_complex() ? run(in) : Tensors{in[0] + 1, in[0].neg(), in[0].t().contiguous()};
    };
    const std::string explained = expect_same(run_real, make);
    EXPECT_TRUE(contains(explained, "program: ")) << explained;
  }
}

TEST(EdgeCasesTest, ResultsMayBeInputsTwiceTheSameUndefinedOrConstant) {
  const at::NoGradGuard no_grad;
  const auto run = [](const Tensors& in) {
    const at::Tensor y = in[0] + 1;
    return Tensors{in[0], y, y, at::Tensor(), y.view({-1}), torch::tensor({1.0F, 2.0F})};
  };
  Function fast(run, ScriptOptions().min_operators(0));
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = at::rand({2, 2});
    Tensors found = fast({x});
    EXPECT_TRUE(found[0].is_same(x));
    EXPECT_TRUE(same_bits(run({x}), found));
    EXPECT_TRUE(found[4].is_alias_of(found[1]));
    found[1].zero_();
    found[5].zero_();  // is nobody else's
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

// Calls `run` and its script in turn on what `begin` makes of a new leaf, continues with input and result,
// and expects the same values, shapes and gradients of the leaf.
std::string expect_same_graph(const std::function<at::Tensor(at::Tensor)>& run,
                              const std::function<at::Tensor(const at::Tensor&)>& begin,
                              const std::function<at::Tensor(at::Tensor, at::Tensor)>& continue_from) {
  auto fast = script([run](const at::Tensor& h) { return run(h); });
  for (int i = 0; i < 5; ++i) {
    std::array<Tensors, 2> seen;
    std::array<bool, 2> is_input{};
    for (const bool scripted : {false, true}) {
      at::manual_seed(i);
      const at::Tensor x = at::randn({3, 4}).requires_grad_(), h = begin(x);
      const at::Tensor result = scripted ? fast(h) : run(h);
      const at::Tensor last = continue_from(h, result);
      last.sum().backward();
      seen[scripted ? 1 : 0] = {x.grad(), last.detach(), h.detach(), result.detach()};
      is_input[scripted ? 1 : 0] = result.is_same(h);
    }
    EXPECT_TRUE(same_bits(seen[0], seen[1])) << "call " << i << "\n" << fast.explain();
    EXPECT_EQ(is_input[0], is_input[1]);
  }
  return fast.explain();
}

TEST(EdgeCasesTest, InputsWithAGraphThatAreChangedInPlace) {
  const auto three_times = [](const at::Tensor& x) { return x * 3; };
  const auto a_part = [](const at::Tensor& x) { return (x * 3).slice(1, 1, 3); };
  const auto both = [](const at::Tensor& h, const at::Tensor& y) { return h.sum() + (y * y).sum(); };
  const auto relu = [](at::Tensor h) { return h.relu_(); };
  const auto twice = [](at::Tensor h) {
    h.mul_(2).select(0, 1).sin_();
    return h.exp();
  };
  for (const auto& body : std::vector<std::function<at::Tensor(at::Tensor)>>{relu, twice}) {
    for (const auto& begin : std::vector<std::function<at::Tensor(const at::Tensor&)>>{three_times, a_part}) {
      const std::string explained = expect_same_graph(body, begin, both);
      EXPECT_TRUE(contains(explained, "is changed in place with gradients on")) << explained;
    }
  }
  const auto turned = [](at::Tensor h) {
    h.t_();
    return h.sin() * 2;
  };
  const std::string explained = expect_same_graph(turned, three_times, both);
  EXPECT_TRUE(contains(explained, "changes the shape of a tensor that it did not make")) << explained;

  auto fast = script(relu);
  COHORT_EXPECT_THROW_WITH(fast(at::rand({3}).requires_grad_()), c10::Error, "leaf");
  auto two = script([](at::Tensor a, const at::Tensor& b) { return a.mul_(2) + b; });
  const at::Tensor h = at::rand({3}).requires_grad_() * 1;
  COHORT_EXPECT_THROW_WITH(two(h, h.view({3})), UsageError, "input 1 shares its memory");
  const auto on_halves = [](auto&& run) {
    const at::Tensor x = at::arange(8, at::kFloat).view({2, 4}).requires_grad_(), all = x * 3;
    const at::Tensor y = run(all.narrow(1, 0, 2), all.narrow(1, 2, 2));
    return torch::autograd::grad({(y * y).sum() + (all * all).sum()}, {x})[0];
  };
  const at::Tensor expected = on_halves([](at::Tensor a, const at::Tensor& b) { return a.mul_(2) + b; });
  for (int call = 0; call < 4; ++call) EXPECT_TRUE(same_bits(on_halves(two), expected)) << call;
}

TEST(EdgeCasesTest, ResultsThatAreViewsOfAnInputWithAGraph) {
  const auto three_times = [](const at::Tensor& x) { return x * 3; };
  const auto write = [](const at::Tensor& h, at::Tensor y) {
    y.mul_(2);
    return (h * h).sum();
  };
  for (const auto& body : std::vector<std::function<at::Tensor(at::Tensor)>>{
           [](const at::Tensor& h) { return h; }, [](const at::Tensor& h) { return h.t()[1]; },
           [](const at::Tensor& h) { return h.view({-1}); }}) {
    const std::string explained = expect_same_graph(body, three_times, write);
    EXPECT_TRUE(contains(explained, "is an input, a parameter, or a view of one")) << explained;
  }
}

// Who writes to the result changes the input, and its history.
TEST(EdgeCasesTest, ResultsThatReadAnInputsElementsInAnotherWay) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> views = {
      {"slice", [](const at::Tensor& z) { return z.slice(0, 1); }},
      {"_neg_view", [](const at::Tensor& z) { return z._neg_view(); }},
      {"conj", [](const at::Tensor& z) { return z.conj(); }},
      {"_neg_view of conj", [](const at::Tensor& z) { return z.conj().slice(0, 1)._neg_view(); }},
      {"real", [](const at::Tensor& z) { return at::real(z); }},
      {"imag of conj", [](const at::Tensor& z) { return at::imag(z.conj()).slice(0, 1); }},
      {"view_as_real", [](const at::Tensor& z) { return at::view_as_real(z).select(1, 0); }},
      {"view_as_complex", [](const at::Tensor& x) { return at::view_as_complex(x).conj(); }},
  };
  const std::vector<std::function<at::Tensor(int call)>> inputs = {
      [](int call) { return at::complex(at::arange(4.0) + call, at::arange(4.0) * 0.5); },
      [](int call) { return at::complex(at::arange(4.0) + call, at::arange(4.0) * 0.5).conj(); },
      [](int call) { return at::arange(8.0).view({4, 2}) * 0.5 + call; },
      [](int call) { return (at::arange(8.0).view({4, 2}) * 0.5 + call)._neg_view(); },
  };
  int compared = 0;
  for (const auto& [name, view] : views) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!test::error_of([&] { view(inputs[i](0)); }).empty()) continue;
      const auto fn = [&](const at::Tensor& x) { return view(x); };
      auto fast = script(fn, ScriptOptions().min_operators(0));
      for (int call = 0; call < 8; ++call) {
        const auto seen_by = [&](auto&& run) {
          const at::Tensor weight = at::full({1}, 0.5).requires_grad_();
          const at::Tensor x = inputs[i](call), y = run(x);
          y.mul_(weight);
          const at::Tensor numbers = x.is_complex() ? at::view_as_real(x.resolve_conj()) : x;
          numbers.square().sum().backward();
          return Tensors{x.detach(), y.detach(), weight.grad()};
        };
        Tensors expected, found;
        const std::string eagers_error = test::error_of([&] { expected = seen_by(fn); });
        const std::string error = test::error_of([&] { found = seen_by(fast); });
        ASSERT_EQ(eagers_error.empty(), error.empty()) << name << i << call << eagers_error << error;
        ASSERT_TRUE(same_bits(expected, found)) << name << i << call << fast.explain();
        compared += error.empty() ? 1 : 0;
      }
    }
  }
  EXPECT_GT(compared, 8 * 12);
}

TEST(EdgeCasesTest, GradientsOfOneMemoryAddUpApart) {
  const at::Tensor a = at::ones({4}).requires_grad_(), b = at::ones({4}).requires_grad_(),
                   c = at::ones({2, 2}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return x * (a + b + c.view({4})); });
  const at::Tensor x = at::arange(4, at::kFloat);
  for (int call = 1; call < 7; ++call) {
    fast(x).sum().backward();
    for (const at::Tensor& each : {a, b, c}) EXPECT_TRUE(at::equal(each.grad().view({4}), x * call)) << call;
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(EdgeCasesTest, IndicesMayBeNumbersAndNoMasks) {
  const auto make = [](int call) {
    at::manual_seed(call);
    return Tensors{at::randn({5, 4}), at::randint(0, 5, {6})};
  };
  const auto numbers = [](const Tensors& in) {
    at::Tensor y = in[0].index({in[1]}) * 2;
    y.index_put_({torch::indexing::Slice(), torch::tensor({0, 2})}, in[0].index({0, torch::tensor({1, 3})}));
    return Tensors{y, in[0].index({in[1], in[1].remainder(4)})};
  };
  EXPECT_TRUE(contains(expect_same(numbers, make), "program: "));
  const auto mask = [](const Tensors& in) { return Tensors{in[0].index({in[0] > 0}) * 2}; };
  EXPECT_TRUE(
      contains(expect_same(mask, make), "index.Tensor returns a tensor whose size depends on values"));

  const at::Tensor table = at::randn({5, 4}).requires_grad_();
  const auto look_up = [=](const at::Tensor& places) { return table.index({places}).exp(); };
  auto fast = script(look_up);
  for (int call = 0; call < 5; ++call) {
    const at::Tensor places = make(call)[1];
    const at::Tensor expected = torch::autograd::grad({look_up(places).sum()}, {table})[0];
    EXPECT_TRUE(same_bits(torch::autograd::grad({fast(places).sum()}, {table})[0], expected)) << call;
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(EdgeCasesTest, TensorsThatChangeTheirShapeInPlace) {
  const at::NoGradGuard no_grad;
  const auto make = [](int call) { return Tensors{at::full({2, 3}, 1.0 + call)}; };
  const auto made = [](const Tensors& in) {
    at::Tensor y = in[0] * 2, z = in[0] + 1;
    const at::Tensor row = y[0];
    y.t_();
    y.unsqueeze_(0).squeeze_().add_(1);
    z.resize_({2, 2}).mul_(3);
    at::Tensor w = in[0] - 1;
    w.set_data(y);
    w.mul_(2);
    at::Tensor out = at::empty({5});
    out.resize_({0});
    at::add_out(out, in[0], in[0]);
    return Tensors{y.contiguous(), row, z, w.contiguous(), out};
  };
  EXPECT_TRUE(contains(expect_same(made, make), "program: "));

  at::Tensor state = at::ones({2});
  const auto resized = [&](const Tensors& in) {
    state.resize_({in[0].numel()}).copy_(in[0].view(-1));
    return Tensors{state + 1};
  };
  const auto alternating = [](int call) { return Tensors{at::full({2, 2 + call % 3 / 2}, 1.0 + call)}; };
  expect_same(resized, alternating, 12);
  const auto input = [](const Tensors& in) {
    in[0].t_();
    return Tensors{in[0].contiguous()};
  };
  EXPECT_TRUE(contains(expect_same(input, make), "changes the shape of a tensor that it did not make"));
}

TEST(EdgeCasesTest, BuffersThatChangePlacesStayEager) {
  const at::NoGradGuard no_grad;
  at::Tensor front = at::zeros({3}), back = at::ones({3});
  Function fast(
      [&](const Tensors& in) {
        std::swap(front, back);
        front.add_(in[0]);
        return Tensors{front - back};
      },
      ScriptOptions());
  at::Tensor a = at::zeros({3}), b = at::ones({3});
  for (int i = 0; i < 8; ++i) {
    std::swap(a, b);
    a.add_(i);
    EXPECT_TRUE(same_bits(fast({at::full({3}, i)})[0], a - b)) << i;
  }
  EXPECT_TRUE(contains(fast.explain(), "recordings differ")) << fast.explain();
}

// Lengths decide in C++ how many steps there are, without an operator that says so.
TEST(EdgeCasesTest, PackedSequencesOfOtherLengths) {
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  nn::LSTM lstm(nn::LSTMOptions(3, 4).batch_first(true));
  const auto fn = [&](const at::Tensor& x, const at::Tensor& lengths) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(x, lengths, true, /*enforce_sorted=*/false);
    const auto [out, state] = lstm->forward_with_packed_input(packed);
    return std::get<0>(nn::utils::rnn::pad_packed_sequence(out, true, 0.0, 5));
  };
  auto fast = script(fn);
  for (int i = 0; i < 10; ++i) {
    const at::Tensor x = at::randn({2, 5, 3});
    const at::Tensor lengths = i < 5 ? at::tensor({5, 3}) : at::tensor({2, 1 + i % 5});
    EXPECT_TRUE(same_bits(fast(x, lengths), fn(x, lengths))) << i << fast.explain();
  }
  EXPECT_TRUE(contains(fast.explain(), "eager: ")) << fast.explain();
}

TEST(EdgeCasesTest, PlacesToSplitAtThatAreATensor) {
  const at::NoGradGuard no_grad;
  const auto fn = [](const at::Tensor& x, const at::Tensor& at) {
    return at::tensor_split(x, at, 0)[1].sum();
  };
  auto fast = script(fn);
  for (int i = 0; i < 10; ++i) {
    const at::Tensor x = at::randn({6});
    const at::Tensor places = i < 5 ? at::tensor({1, 3}, at::kLong) : at::tensor({2, 3 + i % 3}, at::kLong);
    EXPECT_TRUE(same_bits(fast(x, places), fn(x, places))) << i << fast.explain();
  }
  EXPECT_TRUE(contains(fast.explain(), "tensor_split.tensor_indices_or_sections reads the numbers"))
      << fast.explain();
}

// A number beside a tensor does not widen it; a tensor of one element does.
TEST(EdgeCasesTest, NumbersBesideNarrowTensors) {
  const at::NoGradGuard no_grad;
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = (x * 2.5 + 1).mul(3) - 0.1;
    return std::vector<at::Tensor>{
        y, x + 1, x / 2, at::pow(2.0, x), x.div(3, "floor"), at::where(x > 0, x, 2.5)};
  };
  for (const auto dtype :
       {at::kBool, at::kByte, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kDouble}) {
    auto fast = script(fn);
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = at::randint(1, 5, {4}).to(dtype);
      EXPECT_TRUE(same_bits(fast(x), fn(x))) << dtype << fast.explain();
    }
    EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
  }
}

TEST(EdgeCasesTest, AResultThatComesTwiceHasTwoGradients) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = x.exp();
    return std::vector<at::Tensor>{y, y, y.view({-1})};
  };
  auto fast = script(fn);
  at::Tensor x = at::ones({4}).requires_grad_();
  const auto gradient = [&](const std::vector<at::Tensor>& y) {
    x.mutable_grad().reset();
    (y[0].sum() + 2 * y[1].sum() + 3 * y[2].sum()).backward();
    return x.grad();
  };
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(same_bits(gradient(fast(x)), gradient(fn(x)))) << fast.explain();
}

struct ThreadState {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  bool grad = at::GradMode::is_enabled();
  bool cache = at::autocast::is_autocast_cache_enabled();
  bool recording = Recording::is_active();
  bool operator==(const ThreadState& other) const {
    return keys.included_ == other.keys.included_ && keys.excluded_ == other.keys.excluded_ &&
           grad == other.grad && cache == other.cache && recording == other.recording;
  }
};

TEST(EdgeCasesTest, ExceptionsAnywhereLeaveNothingBehind) {
  const ThreadState before;
  at::manual_seed(1);
  auto model = test::small_mlp();
  const at::Tensor x = at::randn({16, 32}), good = at::randint(0, 10, {16}), bad = at::full({16}, 99);
  optim::SGD sgd(model->parameters(), optim::SGDOptions(0.05));
  auto step = script_step(model, cross_entropy, sgd);
  for (int i = 0; i < 6; ++i) {  // in recordings first, then in replays: a class that does not exist
    EXPECT_THROW(step(x, bad), c10::Error);
    EXPECT_TRUE(before == ThreadState());
    step(x, good);
  }
  EXPECT_TRUE(contains(step.explain(), "program: ")) << step.explain();

  const at::Tensor w = at::ones({2}).requires_grad_();
  bool throws = false;
  w.register_hook([&](const at::Tensor& gradient) {
    if (throws) throw std::runtime_error("the hook throws");
    return gradient;
  });
  auto fast = script([&](const at::Tensor& t) {
    if (throws && t.numel() == 3) throw std::runtime_error("the body throws");
    return t.sum() * w;
  });
  for (int i = 0; i < 6; ++i) {
    throws = true;
    EXPECT_THROW(fast(at::ones({2})).sum().backward(), std::runtime_error);
    EXPECT_THROW(fast(at::ones({3})), std::runtime_error);
    EXPECT_TRUE(before == ThreadState());
    throws = false;
    w.mutable_grad().reset();
    fast(at::ones({2})).sum().backward();
    EXPECT_EQ(w.grad()[0].item<float>(), 2);
  }
}

TEST(EdgeCasesTest, ThreadsRecordAndReplayTheSameFunctionAtOnce) {
  at::manual_seed(1);
  const at::Tensor w = at::rand({8, 8}).requires_grad_();
  const auto fn = [=](const at::Tensor& x) { return at::mm(x, w).sigmoid().mul(x); };
  auto fast = script(fn);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 60; ++i) {
        const at::Tensor x = at::full({1 + (t + i) % 3, 8}, 0.1 * t);
        const auto expected = torch::autograd::grad({fn(x).sum()}, {w});
        const auto found = torch::autograd::grad({fast(x).sum()}, {w});
        if (!same_bits(found, expected)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(contains(fast.explain(), "3 of 8 programs")) << fast.explain();
  EXPECT_FALSE(contains(fast.explain(), "eager")) << fast.explain();
}

TEST(EdgeCasesTest, GradientsAutocastAndNoGradWithinTheFunction) {
  const at::Tensor w = at::rand({4, 4}).requires_grad_();
  const auto penalty = [&](const at::Tensor& x) {
    const at::Tensor y = at::mm(x, w).tanh().sum();
    const at::Tensor slope = torch::autograd::grad({y}, {w}, {}, true, true)[0];
    at::Tensor part;
    {
      const at::NoGradGuard no_grad;
      part = (w * 2).sum();
    }
    const optim::Autocast narrow(at::kCPU, at::kBFloat16);
    return slope.square().sum() * part + at::mm(x, w).sum();
  };
  auto fast = script(penalty);
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = at::randn({3, 4});
    const at::Tensor expected = penalty(x);
    const at::Tensor gradient = torch::autograd::grad({expected}, {w})[0];
    const at::Tensor found = fast(x);
    EXPECT_TRUE(same_bits(found, expected)) << fast.explain();
    EXPECT_TRUE(same_bits(torch::autograd::grad({found}, {w})[0], gradient)) << fast.explain();
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(EdgeCasesTest, GeneratorsOfTheFunctionsOwn) {
  const at::NoGradGuard no_grad;
  auto generator_of_test = at::make_generator<at::CPUGeneratorImpl>(1),
       yours = at::make_generator<at::CPUGeneratorImpl>(1);
  auto* generator = &generator_of_test;
  const auto run = [&](const at::Tensor& x) { return x + at::rand({3}, *generator) + at::rand({3}); };
  auto fast = script([&](const at::Tensor& x) { return x + at::rand({3}, yours) + at::rand({3}); });
  for (int i = 0; i < 6; ++i) {
    at::manual_seed(i);
    const at::Tensor expected = run(at::ones({3}));
    at::manual_seed(i);
    EXPECT_TRUE(same_bits(fast(at::ones({3})), expected));
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

}  // namespace
}  // namespace cohort::script
