// A backward in two halves: its bits, what is computed in which half and how often, and what it frees.
#include "cohort/pipeline/split_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/utils.h>

#include <map>

#include "tests/pipeline/nets.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using Forward = std::function<Tensors(const Tensors&)>;

// What a forward is run on.
struct Problem {
  Forward forward;
  Tensors inputs;          // leaves
  Tensors parameters;      // in any order
  Tensors gradients = {};  // of the outputs; empty: random numbers

  Tensors run(Tensors& arriving) const {
    const Tensors outputs = forward(inputs);
    if (arriving.empty()) {
      for (const at::Tensor& output : outputs) arriving.push_back(at::randn_like(output));
    }
    return outputs;
  }
};

// Both halves against a whole backward, twice, so that gradients are added to.
void expect_bits_of_a_whole_backward(const Problem& problem, double tolerance = 0, bool is_split = true) {
  Tensors arriving = problem.gradients;
  const auto all = [&](const Tensors& inputs) {
    Tensors gradients = take_gradients(problem.parameters);
    for (const at::Tensor& input : inputs) gradients.push_back(input);
    return gradients;
  };
  for (int i = 0; i < 2; ++i) {
    const Tensors outputs = problem.run(arriving);
    Tensors roots, given;
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (!arriving[k].defined() || !outputs[k].requires_grad()) continue;
      roots.push_back(outputs[k]);
      given.push_back(arriving[k]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, given);
  }
  Tensors inputs;
  for (const at::Tensor& input : problem.inputs) inputs.push_back(input.grad() * 0.5);  // the same twice
  zero_grad(problem.inputs);
  const Tensors expected = all(inputs);
  inputs.clear();
  for (int i = 0; i < 2; ++i) {
    SplitGraph graph(problem.run(arriving), problem.inputs);
    Tensors before;
    for (const at::Tensor& parameter : problem.parameters) {
      before.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    inputs = graph.input_gradients(arriving);
    for (std::size_t k = 0; k < before.size() && is_split; ++k) {
      const at::Tensor& now = problem.parameters[k].grad();
      EXPECT_EQ(now.defined(), before[k].defined()) << k;
      EXPECT_TRUE(!now.defined() || at::equal(now, before[k]))
          << "parameter " << k << " is for the second half";
    }
    graph.weight_gradients();
  }
  const Tensors got = all(inputs);
  if (tolerance == 0) return expect_same_bits(got, expected);
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << i;
    EXPECT_TRUE(!got[i].defined() || at::allclose(got[i], expected[i], tolerance, tolerance)) << i;
  }
}

at::Tensor leaf(at::IntArrayRef sizes) {
  return at::randn(sizes).requires_grad_();
}

// conv, norm, ReLU, conv, and around.
struct ConvBlock {
  at::Tensor first = leaf({6, 6, 3, 3}), second = leaf({6, 6, 1, 1}), bias = leaf({6}), scale = leaf({6}),
             shift = leaf({6});

  at::Tensor operator()(const at::Tensor& x) const {
    at::Tensor y = at::conv2d(x, first, {}, 1, 1);
    y = at::batch_norm(y, scale, shift, {}, {}, true, 0.1, 1e-5, false).relu();
    return at::conv2d(y, second, bias) + x;
  }
  Tensors parameters() const { return {first, second, bias, scale, shift}; }
};

TEST(SplitGraphTest, HasTheBitsOfAWholeBackward) {
  torch::manual_seed(1);
  const ConvBlock block;
  expect_bits_of_a_whole_backward({[&](const Tensors& in) { return Tensors{block(block(in[0])).tanh()}; },
                                   {leaf({2, 6, 5, 5})},
                                   block.parameters()});
}

TEST(SplitGraphTest, OfAttentionWithTwoInputs) {
  torch::manual_seed(2);
  const at::Tensor q = leaf({8, 8}), k = leaf({8, 8}), v = leaf({8, 8}), out = leaf({8, 8}),
                   offset = leaf({8}), scale = leaf({8}), position = leaf({4, 8});
  expect_bits_of_a_whole_backward(
      {[&](const Tensors& in) {
         const at::Tensor x = in[0] + position;
         const at::Tensor weights =
             at::softmax(at::matmul(at::linear(x, q), at::linear(in[1], k).transpose(1, 2)), -1);
         const at::Tensor y = at::linear(at::matmul(weights, at::linear(in[1], v)), out, offset);
         return Tensors{at::layer_norm(x + y, {8}, scale, offset), weights};
       },
       {leaf({3, 4, 8}), leaf({3, 4, 8})},
       {q, k, v, out, offset, scale, position}});
}

// A weight that is made of parameters; one that is used by a product and by an addition; one that nothing
// of an input goes through; one that is frozen; an output without a gradient.
TEST(SplitGraphTest, OfParametersThatAreUsedInSeveralWays) {
  torch::manual_seed(3);
  const at::Tensor direction = leaf({6, 6}), length = leaf({6, 1}), shared = leaf({6}), alone = leaf({4, 6}),
                   square = leaf({6, 6}), unused = leaf({3});
  const at::Tensor frozen = at::randn({6, 6});
  const Problem problem{[&](const Tensors& in) {
                          const at::Tensor weight = direction / direction.norm(2, 1, true) * length;
                          const at::Tensor y =
                              at::linear(in[0], weight, shared).sin() * shared + at::mm(in[0], frozen);
                          return Tensors{at::mm(at::mm(y, square), square.t()), at::mm(alone, square),
                                         y.detach(), y * unused.sum()};
                        },
                        {leaf({5, 6})},
                        {direction, length, shared, alone, square, unused},
                        {at::randn({5, 6}), at::randn({4, 6}), at::randn({5, 6}), at::Tensor()}};
  expect_bits_of_a_whole_backward(problem);
}

TEST(SplitGraphTest, WithoutAnInputThatNeedsAGradientAllIsForTheSecondHalf) {
  torch::manual_seed(4);
  const ConvBlock block;
  const at::Tensor input = at::randn({2, 6, 5, 5}), arriving = at::randn({2, 6, 5, 5});
  block(input).backward(arriving);
  const Tensors expected = take_gradients(block.parameters());
  SplitGraph graph({block(input)}, {input});
  EXPECT_FALSE(graph.input_gradients({arriving}).at(0).defined());
  EXPECT_FALSE(block.first.grad().defined());
  graph.weight_gradients();
  expect_same_bits(take_gradients(block.parameters()), expected);
  SplitGraph nothing({at::Tensor(), input}, {at::Tensor(), input});
  EXPECT_FALSE(nothing.input_gradients({at::Tensor(), arriving}).at(1).defined());
  nothing.weight_gradients();
}

// What the backward operators were asked for: {input, weight} of convolutions, and calls.
std::map<std::string, int> asked_for(const std::function<void()>& backward) {
  static std::map<std::string, int> counts;
  counts.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& of) -> std::unique_ptr<at::ObserverContext> {
        const std::string name = of.name();
        if (name == "aten::convolution_backward") {
          const auto mask = of.inputs().back().toBoolList();
          if (mask.get(0)) ++counts["input"];
          if (mask.get(1)) ++counts["weight"];
        } else if (name.ends_with("_backward") && !name.starts_with("aten::_slow_conv")) {  // of the above
          ++counts[name];
        }
        return nullptr;
      }).needsInputs(true));
  backward();
  at::removeCallback(handle);
  return counts;
}

TEST(SplitGraphTest, NothingIsComputedTwice) {
  torch::manual_seed(5);
  const ConvBlock block;
  const at::Tensor input = leaf({2, 6, 5, 5});
  const auto counted = [](const std::map<std::string, int>& counts, const std::string& name) {
    const auto found = counts.find(name);
    return found == counts.end() ? 0 : found->second;
  };
  SplitGraph graph({block(block(block(input)))}, {input});
  const auto first = asked_for([&] { graph.input_gradients({at::randn({2, 6, 5, 5})}); });
  EXPECT_EQ(counted(first, "input"), 6);
  EXPECT_EQ(counted(first, "weight"), 0);
  EXPECT_EQ(counted(first, "aten::native_batch_norm_backward"), 3);
  EXPECT_EQ(counted(first, "aten::threshold_backward"), 3);
  const auto second = asked_for([&] { graph.weight_gradients(); });
  EXPECT_EQ(second, (std::map<std::string, int>{{"weight", 6}}));
}

// Hooks of a parameter, of one whose gradient comes with the first half, and of what lies between.
TEST(SplitGraphTest, HooksRunOnce) {
  torch::manual_seed(6);
  const ConvBlock block;
  int calls = 0;
  const auto hook = [&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  };
  for (const at::Tensor& parameter : {block.first, block.scale}) parameter.register_hook(hook);
  expect_bits_of_a_whole_backward({[&](const Tensors& in) {
                                     at::Tensor y = at::conv2d(in[0], block.first, {}, 1, 1);
                                     y.register_hook(hook);
                                     y.retain_grad();
                                     return Tensors{block(y)};
                                   },
                                   {leaf({2, 6, 5, 5})},
                                   block.parameters()});
  EXPECT_EQ(calls, 4 * 3) << "three hooks, four backwards";
}

// A parameter of a norm or an addition, in one computation with one of a product; that computation is on no
// way to an input.
TEST(SplitGraphTest, OfParametersOfBothHalvesInOneComputation) {
  torch::manual_seed(9);
  const at::Tensor a = leaf({6}), b = leaf({6}), c = leaf({6}), weight = leaf({6, 6});
  int calls = 0;
  expect_bits_of_a_whole_backward({[&](const Tensors& in) {
                                     const at::Tensor factor = a * b, next = (b + c).sin();
                                     factor.register_hook([&](const at::Tensor& gradient) {
                                       ++calls;
                                       return gradient * 2;
                                     });
                                     return Tensors{at::linear(in[0] * factor, weight, c) * next};
                                   },
                                   {leaf({5, 6})},
                                   {a, b, c, weight}});
  EXPECT_EQ(calls, 4);
}

// Parameters, an input, hooks and, in half of them, writes to a part of a tensor in any places.
TEST(SplitGraphTest, OfRandomGraphs) {
  for (int seed = 0; seed < 300; ++seed) {
    const bool has_writes = seed % 2 == 1;
    SCOPED_TRACE(seed);
    torch::manual_seed(seed);
    const auto number = [](std::int64_t below) { return at::randint(below, {1}).item<std::int64_t>(); };
    Tensors parameters;
    const auto random = [] { return at::randn({3, 3}, at::kDouble); };
    for (int i = 0; i < 4; ++i) parameters.push_back(random().requires_grad_());
    const at::Tensor input = random().requires_grad_();
    int calls = 0;
    const auto hook = [&](const at::Tensor& gradient) {
      ++calls;
      return gradient * 0.5;
    };
    for (const at::Tensor& parameter : parameters) {
      if (number(4) == 0) parameter.register_hook(hook);
    }
    const int program = static_cast<int>(number(1 << 20));
    std::vector<int> calls_of_runs;
    const auto forward = [&](const Tensors& in) {
      calls_of_runs.push_back(std::exchange(calls, 0));
      torch::manual_seed(program);
      Tensors values = parameters;
      values.push_back(in[0]);
      for (int i = 0; i < 8; ++i) {
        const auto any = [&] { return values[static_cast<std::size_t>(number(std::ssize(values)))]; };
        const at::Tensor x = any(), y = i == 7 ? in[0].sin() + x : any();
        at::Tensor z;
        switch (number(has_writes ? 5 : 4)) {
          case 0:
            z = at::mm(x, y);
            break;
          case 1:
            z = x * y;
            break;
          case 2:
            z = at::linear(x, y);
            break;
          case 4:
            z = x * 0.5;
            z[number(3)].mul_(y[number(3)]);
            break;
          default:
            z = (x + y).tanh();
            break;
        }
        if (number(4) == 0) z.register_hook(hook);
        values.push_back(z);
      }
      return Tensors{values.back(), values[values.size() - 2]};
    };
    // Sums of one parameter's gradients may have another order.
    expect_bits_of_a_whole_backward({forward, {input}, parameters, {random(), random()}}, 1e-10,
                                    /*is_split=*/!has_writes);
    calls_of_runs.push_back(calls);
    EXPECT_EQ(calls_of_runs, std::vector<int>({0, calls, calls, calls, calls})) << "of two backwards, twice";
    if (HasFailure()) return;
  }
}

struct Count : torch::autograd::FunctionPostHook {
  explicit Count(int& of) : calls(of) {}
  Tensors operator()(const Tensors& outputs, const Tensors& /*inputs*/) override {
    ++calls;
    Tensors scaled;
    for (const at::Tensor& output : outputs) scaled.push_back(output.defined() ? output * 2 : output);
    return scaled;
  }
  int& calls;
};

// On an operator that can be split, on one that cannot, on one that no input is reached from, on a
// parameter; where the parameters below have hooks of their own.
TEST(SplitGraphTest, PostHooksRunOnce) {
  for (const bool has_parameter_hooks : {false, true}) {
    torch::manual_seed(10);
    const at::Tensor weight = leaf({6, 6}), bias = leaf({6}), scale = leaf({6}), other = leaf({6, 6});
    int calls = 0, hooks = 0;
    if (has_parameter_hooks) {
      for (const at::Tensor& parameter : {weight, scale}) {
        parameter.register_hook([&](const at::Tensor& gradient) {
          ++hooks;
          return gradient * 3;
        });
      }
    }
    const auto counted = [&](const at::Tensor& tensor) {
      tensor.grad_fn()->add_post_hook(std::make_unique<Count>(calls));
      return tensor;
    };
    int added = 0;
    const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
    accumulator->add_post_hook(std::make_unique<Count>(added));
    for (const int which : {0, 1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << "node " << which << (has_parameter_hooks ? ", hooks" : ""));
      calls = hooks = added = 0;
      const Problem problem{[&](const Tensors& in) {
                              const auto at = [&](int place, const at::Tensor& tensor) {
                                return place == which ? counted(tensor) : tensor;
                              };
                              const at::Tensor x = at(0, at::linear(in[0].sin(), weight, bias));
                              const at::Tensor y = at(1, x * scale), z = at(2, weight * other);
                              return Tensors{at(3, at::mm(y.tanh(), z))};
                            },
                            {leaf({5, 6})},
                            {weight, bias, scale, other}};
      // A node with parameters of the second half below it runs in both halves where the graph is split.
      const bool runs_twice = which == 0 || which == 3 || (which == 1 && has_parameter_hooks);
      expect_bits_of_a_whole_backward(problem, 0, /*is_split=*/!runs_twice);
      EXPECT_EQ(calls, 4) << "two backwards, twice";
      EXPECT_EQ(added, 4);
      EXPECT_EQ(hooks, has_parameter_hooks ? 8 : 0);
    }
  }
}

TEST(SplitGraphTest, FreesWhatOnlyInputsNeeded) {
  torch::manual_seed(7);
  const at::Tensor weight = leaf({6, 6}), input = leaf({5, 6});
  c10::weak_intrusive_ptr<c10::StorageImpl> of_tanh(c10::intrusive_ptr<c10::StorageImpl>{}),
      of_product(c10::intrusive_ptr<c10::StorageImpl>{});
  SplitGraph graph;
  {
    const auto storage = [](const at::Tensor& tensor) {
      return c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
    };
    const at::Tensor tanh = input.tanh(), into = tanh * 2;
    of_tanh = storage(tanh);
    of_product = storage(into);
    graph = SplitGraph({at::mm(into, weight)}, {input});
  }
  EXPECT_FALSE(of_tanh.expired());
  graph.input_gradients({at::randn({5, 6})});
  EXPECT_TRUE(of_tanh.expired()) << "tanh's backward reads it, and is over";
  EXPECT_FALSE(of_product.expired()) << "the weight's gradient reads it";
  graph.weight_gradients();
  EXPECT_TRUE(of_product.expired());
}

// What arrives continues to both as it is.
TEST(SplitGraphTest, WhoGetsTheGradientOfAnInputMayWriteToIt) {
  at::Tensor input = at::ones({3}).requires_grad_(), weight = at::ones({3}).requires_grad_();
  SplitGraph graph({input + weight}, {input});
  at::Tensor gradient = graph.input_gradients({at::full({3}, 5.0)}).at(0);
  gradient.add_(1);
  graph.weight_gradients();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({3}, 5.0)));
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, std::string* halves) {
    context->save_for_backward({x, weight});
    context->saved_data["halves"] = reinterpret_cast<std::int64_t>(halves);
    return x * weight;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto saved = context->get_saved_variables();
    auto* const halves = reinterpret_cast<std::string*>(context->saved_data["halves"].toInt());
    *halves += "(";
    Tensors result(3);
    if (context->needs_input_grad(0)) result[0] = gradients[0] * saved[1], *halves += "x";
    if (context->needs_input_grad(1)) result[1] = (gradients[0] * saved[0]).sum(0), *halves += "w";
    *halves += ")";
    return result;
  }
};

TEST(SplitGraphTest, AFunctionsGradientsComeApartWhereItSaysSo) {
  torch::manual_seed(8);
  const at::Tensor weight = leaf({6});
  std::string halves;
  const Problem problem{
      [&](const Tensors& in) { return Tensors{Scale::apply(in[0].sin(), weight, &halves)}; },
      {leaf({5, 6})},
      {weight}};
  expect_bits_of_a_whole_backward(problem);
  EXPECT_EQ(halves, "(xw)(xw)(xw)(xw)");
  halves.clear();
  register_splittable_backward<Scale>();
  expect_bits_of_a_whole_backward(problem);
  EXPECT_EQ(halves, "(xw)(xw)(x)(w)(x)(w)");
}

}  // namespace
}  // namespace cohort::pipeline
