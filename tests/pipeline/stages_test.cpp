// What stages may be, and what may go between them.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

// Two outputs, the second not differentiable, and a third that may be missing.
struct SplitterImpl : torch::nn::Module {
  SplitterImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor y = linear->forward(x);
    return {y.tanh(), y.argmax(1), at::Tensor()};
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Splitter);

struct JoinerImpl : torch::nn::Module {
  JoinerImpl() { linear = register_module("linear", torch::nn::Linear(6, 4)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& index, const at::Tensor& nothing) {
    EXPECT_FALSE(nothing.defined());
    EXPECT_EQ(index.scalar_type(), at::kLong);
    return linear->forward(x) * (1 + index.unsqueeze(1).to(at::kFloat));
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Joiner);

TEST(StagesTest, HandOverSeveralTensorsOfAnyTypeAndNone) {
  torch::manual_seed(3);
  Splitter first;
  Joiner second;
  Tensors parameters = first->parameters();
  for (const at::Tensor& parameter : second->parameters()) parameters.push_back(parameter);
  const at::Tensor input = torch::randn({8, 6}), target = torch::randn({8, 4});
  plain_step(
      [&](const at::Tensor& x) {
        const auto [a, b, c] = first->forward(x);
        return second->forward(a, b, c);
      },
      input, target, {3, 3, 2});
  const Tensors expected = take_gradients(parameters);
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe({first, second}, two_placements(schedule));
    pipe.step(input, target, mse);
    expect_same_bits(take_gradients(parameters), expected);
    mse(pipe.forward(input), target).backward();
    const Tensors of_module = take_gradients(parameters);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::allclose(of_module[i], expected[i], 1e-4, 1e-6));
  }
}

// Of two outputs one is used, so the other gets no gradient.
TEST(StagesTest, GradientsThatDoNotComeAreNone) {
  torch::manual_seed(4);
  torch::nn::Linear a(4, 4), b(4, 4), c(4, 2);
  Tensors parameters = a->parameters();
  for (const auto& module : {b, c}) {
    for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
  }
  const Stage first(
      [=](const Tensors& in) mutable { return Tensors{a->forward(in.at(0)), b->forward(in.at(0))}; },
      {a->weight, a->bias, b->weight, b->bias});
  const Stage second([=](const Tensors& in) mutable { return Tensors{c->forward(in.at(1))}; },
                     c->parameters());
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  plain_step([&](const at::Tensor& x) { return c->forward(b->forward(x)); }, input, target, {3, 3});
  const Tensors expected = take_gradients(parameters);
  ASSERT_FALSE(expected[0].defined());
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe({first, second}, two_placements(schedule));
    pipe.step(input, target, mse);
    expect_same_bits(take_gradients(parameters), expected);
  }
}

TEST(StagesTest, NothingThatWantsAGradientIsNoError) {
  const Stage first([](const Tensors& in) { return Tensors{in.at(0).detach() * 2}; }, {});
  torch::nn::Linear last(4, 2);
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  Pipeline pipe({first, last}, two_placements());
  pipe.step(input, target, mse);
  EXPECT_TRUE(last->weight.grad().defined());
  last->weight.requires_grad_(false);
  last->bias.requires_grad_(false);
  EXPECT_FALSE(pipe.step(input, target, mse).requires_grad());
}

TEST(StagesTest, SkipsPassTheStagesBetween) {
  torch::manual_seed(5);
  std::vector<torch::nn::Linear> linear;
  Tensors parameters;
  for (int i = 0; i < 4; ++i) {
    linear.emplace_back(5, 5);
    for (const at::Tensor& parameter : linear.back()->parameters()) parameters.push_back(parameter);
  }
  // 0 sends to 2 and, twice, to 3; 1 sends to 3.
  const auto run = [&](std::size_t i, const at::Tensor& x) { return linear[i]->forward(x).tanh(); };
  const std::vector<Stage> stages{
      Stage([=](const Tensors& in) { return Tensors{run(0, in.at(0)), in.at(0) + 1, run(0, in.at(0)) * 3}; },
            linear[0]->parameters()),
      Stage([=](const Tensors& in) { return Tensors{run(1, in.at(0)) * 2, run(1, in.at(0))}; },
            linear[1]->parameters()),
      Stage([=](const Tensors& in) { return Tensors{run(2, in.at(0)) + in.at(1)}; }, linear[2]->parameters()),
      Stage([=](const Tensors& in) { return Tensors{run(3, in.at(0)) + in.at(1) * in.at(2) + in.at(3)}; },
            linear[3]->parameters())};
  const auto plain = [&](const at::Tensor& x) {
    const at::Tensor a = run(0, x), skip = x + 1, triple = run(0, x) * 3;
    const at::Tensor b = run(1, a) * 2, side = run(1, a);
    const at::Tensor c = run(2, b) + skip;
    return run(3, c) + triple * side + triple;
  };
  const at::Tensor input = torch::randn({7, 5}), target = torch::randn({7, 5});
  const at::Tensor loss = plain_step(plain, input, target, {3, 3, 1});
  const Tensors expected = take_gradients(parameters);
  for (const auto& [schedule, count] : {std::pair{Schedule::kFillDrain, 4},
                                        {Schedule::kOneFOneB, 4},
                                        {Schedule::kInterleaved, 2},
                                        {Schedule::kZeroBubble, 4},
                                        {Schedule::kFillDrain, 1}}) {
    PipelineOptions options = two_placements(schedule);
    options.placements = placements(count);
    options.skips = {{.from = 0, .output = 1, .to = 2},
                     {.from = 0, .output = 2, .to = 3},
                     {.from = 1, .output = 1, .to = 3},
                     {.from = 0, .output = 2, .to = 3}};
    Pipeline pipe(stages, options);
    EXPECT_TRUE(at::allclose(pipe.step(input, target, mse), loss));
    const Tensors got = take_gradients(parameters);
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6)) << i;
  }
}

TEST(StagesTest, ParametersOfTwoStagesGetTheSum) {
  torch::manual_seed(6);
  torch::nn::Linear tied(5, 5), between(5, 5);
  Tensors parameters = tied->parameters();
  for (const at::Tensor& parameter : between->parameters()) parameters.push_back(parameter);
  const at::Tensor input = torch::randn({12, 5}), target = torch::randn({12, 5});
  const auto plain = [&](const at::Tensor& x) {
    return tied->forward(between->forward(tied->forward(x)).tanh());
  };
  plain_step(plain, input, target, {3, 3, 3, 3});
  const Tensors expected = take_gradients(parameters);
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    PipelineOptions options = two_placements(schedule);
    Pipeline pipe({torch::nn::Sequential(tied, between), torch::nn::Sequential(torch::nn::Tanh(), tied)},
                  options);
    EXPECT_EQ(pipe.parameters().size(), 4u) << "each once";
    for (int repeat = 0; repeat < 20; ++repeat) {
      pipe.step(input, target, mse);
      const Tensors got = take_gradients(parameters);
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::allclose(got[i], expected[i], 0, 1e-6)) << i;
    }
  }
}

TEST(StagesTest, AreLayersHoldersAndWhatAnLstmReturns) {
  torch::manual_seed(7);
  const torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 3).batch_first(true));
  const torch::nn::Linear linear(3, 3), last(3, 2);
  const Stage head(
      [=](const Tensors& in) mutable { return Tensors{in.at(0).select(1, 1) + in.at(1).squeeze(0)}; }, {});
  PipelineOptions options = two_placements();
  options.placements = placements(4);
  Pipeline pipe({lstm, head, core::AnyLayer(linear), Stage({{"last", core::AnyLayer(last)}})}, options);
  EXPECT_EQ(pipe.stages()[0].name(), "LSTM");
  EXPECT_EQ(pipe.stages()[2].name(), "Linear");
  const at::Tensor input = torch::randn({3, 2, 4}), target = torch::randn({3, 2});
  pipe.step(input, target, mse);
  EXPECT_TRUE(last->weight.grad().defined());
  EXPECT_TRUE(lstm->parameters()[0].grad().defined());
  EXPECT_EQ(pipe.parameters().size(), 8u);
}

// A plain module, whose forward is cut by hand: into functions, into its own modules, or as a list of layers.
struct PlainImpl : torch::nn::Module, core::LayerList {
  at::Tensor forward(const at::Tensor& x) { return decoder(torch::relu(encoder(x))); }
  std::vector<core::NamedLayer> named_layers() override {
    return {{"encoder", encoder}, {"relu", torch::nn::ReLU()}, {"decoder", decoder}};
  }
  torch::nn::Linear encoder{register_module("encoder", torch::nn::Linear(10, 24))};
  torch::nn::Linear decoder{register_module("decoder", torch::nn::Linear(24, 5))};
};
TORCH_MODULE(Plain);

TEST(StagesTest, AreWhatAPlainModuleIsCutInto) {
  Plain net;
  const at::Tensor input = torch::randn({8, 10}), target = torch::randn({8, 5});
  plain_step([&](const at::Tensor& x) { return net->forward(x); }, input, target, {3, 3, 2});
  const Tensors expected = take_gradients(net->parameters());

  const Stage head([net](const Tensors& x) mutable { return Tensors{torch::relu(net->encoder(x[0]))}; },
                   net->encoder->parameters());
  const Stage tail([net](const Tensors& x) mutable { return Tensors{net->decoder(x[0])}; },
                   net->decoder->parameters());
  const Stage whole(net->named_layers());
  const std::vector<std::vector<Stage>> cuts{
      {head, tail},
      {torch::nn::Sequential(net->encoder, torch::nn::ReLU()), net->decoder},
      {whole.part(0, 2), whole.part(2, whole.layers().size())}};
  for (const std::vector<Stage>& stages : cuts) {
    Pipeline pipe(stages, two_placements(Schedule::kOneFOneB));
    pipe.step(input, target, mse);
    expect_same_bits(take_gradients(net->parameters()), expected);
  }
}

TEST(StagesTest, AreCutAtTheirLayersOnly) {
  COHORT_EXPECT_THROW_WITH(Stage(Plain()).part(0, 1), UsageError,
                           "cannot take layers 0 to 1: got Plain, expected a list of layers. Try: a "
                           "Sequential, a LayerList or a stage per part");
  COHORT_EXPECT_THROW_WITH(Stage(mlp()).part(0, 8), UsageError,
                           "got layers 0 to 8 of Sequential, expected some of its 7");
}

struct ScaleByImpl : torch::nn::Module {
  ScaleByImpl() : scale(register_parameter("scale", torch::arange(1, 5, torch::kFloat))) {}
  at::Tensor forward(at::Tensor x) { return x.mul_(scale); }
  at::Tensor scale;
};
TORCH_MODULE(ScaleBy);

TEST(StagesTest, MayScaleTheBatchByAParameter) {
  const torch::nn::Sequential model{ScaleBy(), torch::nn::Linear(4, 4), torch::nn::Linear(4, 2)};
  auto whole = model;
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  plain_step([&](const at::Tensor& x) { return whole->forward(x.clone()); }, input, target, {3, 3});
  const Tensors expected = take_gradients(model->parameters());
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe(cut(model, {2}), two_placements(schedule));
    const at::Tensor x = input.clone();
    pipe.step(x, target, mse);
    expect_same_bits(take_gradients(model->parameters()), expected);
    EXPECT_TRUE(at::equal(x, input * model->parameters()[0].detach()));
    COHORT_EXPECT_THROW_WITH(pipe.forward(x), StageError,
                             "input 0 is changed in place by what needs a gradient");
  }
}

// What LibTorch says of an input (whether it has a graph, whether it may be written to) is the same for every
// micro-batch, and that of a batch which is cut with detach(): what one writes is data to the next.
TEST(StagesTest, MicroBatchesShareNoHistoryOfTheBatch) {
  torch::nn::Linear last(4, 2);
  ScaleBy scale;
  std::vector<std::string> states;
  // It takes another way where an input has a graph.
  auto first = [&states, scale](const at::Tensor& x) mutable {
    states.push_back(base::concat(x.requires_grad(), x.is_leaf(), x.grad_fn() != nullptr));
    const at::Tensor rows = x.slice(0, 0, 2);
    const at::Tensor y = x.requires_grad() ? x * 2 : scale->forward(x);
    // Where it has not been asked for its new history, a view is a leaf that LibTorch would not write to.
    if (!rows.is_leaf()) at::Tensor(rows).mul_(0.5);
    return y * 1;
  };
  Tensors parameters{scale->scale};
  for (const at::Tensor& parameter : last->parameters()) parameters.push_back(parameter);
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  EXPECT_THROW(plain_step([&](const at::Tensor& x) { return last->forward(scale->forward(x)); },
                          input.clone(), target, {3, 3}),
               c10::Error)
      << "cut with its history, the batch takes the second loss to the graph of the first";
  zero_grad(parameters);
  const at::Tensor written = input.clone();
  const at::Tensor loss = plain_step([&](const at::Tensor& x) { return last->forward(first(x.detach())); },
                                     written, target, {3, 3});
  const Tensors expected = take_gradients(parameters);
  const auto states_of_the_loop = std::exchange(states, {});
  ASSERT_EQ(states_of_the_loop.size(), 2U);
  EXPECT_EQ(states_of_the_loop[0], states_of_the_loop[1]);
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    const Stage stage([first](const Tensors& in) mutable { return Tensors{first(in.at(0))}; },
                      {scale->scale});
    Pipeline pipe({stage, last}, two_placements(schedule));
    const at::Tensor x = input.clone();
    EXPECT_TRUE(at::equal(pipe.step(x, target, mse), loss));
    expect_same_bits(take_gradients(parameters), expected);
    EXPECT_TRUE(at::equal(x, written));
    EXPECT_FALSE(x.requires_grad());
    EXPECT_EQ(std::exchange(states, {}), states_of_the_loop) << to_string(schedule);
  }
}

// A state that goes from one micro-batch to the next with its graph. Where that begins, at a stage or at the
// loss, the graph is cut: the gradient that the next micro-batch sends back would be lost.
TEST(StagesTest, AGraphThatIsKeptForALaterMicroBatchIsRejected) {
  torch::nn::Linear first(4, 4), last(4, 2);
  const at::Tensor input = torch::randn({6, 4}), target = torch::randn({6, 2});
  const auto run = [&](Schedule schedule, bool is_cut, bool by_loss) {
    const auto state = std::make_shared<at::Tensor>();
    const auto add = [state, is_cut](const at::Tensor& x) {
      const at::Tensor sum = state->defined() ? *state + x : x * 1;
      *state = is_cut ? x.detach() : x;
      return sum;
    };
    const Stage keeps([=](const Tensors& in) { return Tensors{by_loss ? in.at(0) * 1 : add(in.at(0))}; }, {});
    PipelineOptions options = two_placements(schedule);
    options.placements = placements(3);
    Pipeline pipe({first, keeps, last}, options);
    pipe.step(input, target,
              [=](const at::Tensor& y, const at::Tensor& t) { return mse(by_loss ? add(y) : y, t); });
  };
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    for (const bool by_loss : {false, true}) {
      SCOPED_TRACE(base::concat(to_string(schedule), by_loss));
      COHORT_EXPECT_THROW_WITH(run(schedule, false, by_loss), StageError,
                               base::concat("stage ", by_loss ? 2 : 1, " ("));
      COHORT_EXPECT_THROW_WITH(
          run(schedule, false, by_loss), StageError,
          "of micro-batch 1: [pipeline.stage] a backward reaches another micro-batch, of "
          "which a tensor was kept with its graph. Try: detach()");
      run(schedule, true, by_loss);
    }
  }
}

// Its gradient is added up in the order of its uses, however these go through the two.
TEST(StagesTest, ATensorThatIsReturnedTwiceIsOne) {
  torch::nn::Linear first(4, 4), middle(4, 4), last(4, 2);
  const auto use = [](torch::nn::Linear linear, const at::Tensor& a, const at::Tensor& b) {
    return linear->forward(a.tanh() * 3 + b.sigmoid() / 7) + linear->forward(a.exp() * b.sin() + a / 3);
  };
  const auto twice = [](const at::Tensor& x) { return Tensors{x, x}; };
  const auto run = [=](const Tensors& x) { return twice(use(middle, x.at(0), x.at(1))); };
  const auto loss = [=](const Tensors& y, const Tensors& t) {
    return mse(use(last, y.at(0), y.at(1)), t.at(0));
  };
  Tensors parameters;
  for (const torch::nn::Linear& each : {first, middle, last}) {
    for (const at::Tensor& parameter : each->parameters()) parameters.push_back(parameter);
  }
  const at::Tensor input = torch::randn({64, 4}), target = torch::randn({64, 2});
  for (std::int64_t m = 0; m < 4; ++m) {
    const Tensors out = run(twice(torch::nn::Linear(first)->forward(input.narrow(0, 16 * m, 16))));
    (loss(out, {target.narrow(0, 16 * m, 16)}) * 0.25).backward();
  }
  const Tensors expected = take_gradients(parameters);
  for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    const Stage begins([=](const Tensors& in) mutable { return twice(first->forward(in.at(0))); },
                       first->parameters());
    Pipeline pipe({begins, Stage(run, middle->parameters())}, two_placements(schedule, 16));
    pipe.step({input}, {target}, loss);
    expect_same_bits(take_gradients(parameters), expected);
  }
}

TEST(StagesTest, FreedWithTheirPipeline) {
  std::weak_ptr<int> watched;
  {
    const auto token = std::make_shared<int>(1);
    watched = token;
    const Stage stage([token](const Tensors& in) { return Tensors{in.at(0) * *token}; }, {});
    Pipeline pipe({stage, torch::nn::Linear(4, 2)}, two_placements());
    const at::Tensor input = torch::randn({6, 4}).requires_grad_();
    pipe.step(input, torch::randn({6, 2}), mse);
    pipe.forward(input).sum().backward();
    const at::Tensor never_went_back = pipe.forward(input);
  }
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace cohort::pipeline
