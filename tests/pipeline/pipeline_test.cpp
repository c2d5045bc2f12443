#include "cohort/pipeline/pipeline.h"

#include <ATen/autocast_mode.h>
#include <torch/utils.h>

#include "cohort/base/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using Sizes = std::vector<std::int64_t>;

// Two forwards more before the first backward, and all weight gradients at the end.
COHORT_REGISTER_PIPELINE_SCHEDULE("all_late",
                                  {.order =
                                       [](const PlaceInPipeline& place) {
                                         return ActionOrder{
                                             .group = place.num_micro_batches,
                                             .warm_up = place.num_placements - place.placement + 1,
                                             .max_waiting = place.num_micro_batches};
                                       },
                                   .splits_backward = true,
                                   .max_stages = 1});

struct Case {
  Schedule schedule;
  int num_placements;
  std::vector<std::size_t> cuts;
};

const std::vector<Case>& mlp_cases() {
  static const std::vector<Case> cases{
      {Schedule::kFillDrain, 1, {}},        {Schedule::kFillDrain, 2, {3}},
      {Schedule::kFillDrain, 2, {2, 4, 6}}, {Schedule::kOneFOneB, 2, {4}},
      {Schedule::kOneFOneB, 4, {2, 4, 6}},  {Schedule::kInterleaved, 2, {2, 4, 6}},
      {Schedule::kInterleaved, 1, {2, 4}},  {Schedule::kZeroBubble, 1, {}},
      {Schedule::kZeroBubble, 2, {3}},      {Schedule::kZeroBubble, 4, {1, 4, 5}},
      {Schedule("all_late"), 3, {2, 5}}};
  return cases;
}

std::string text_of(const Case& of) {
  return base::concat(to_string(of.schedule), ", ", of.cuts.size() + 1, " stages on ", of.num_placements);
}

PipelineOptions options_of(const Case& of, std::int64_t split_size) {
  PipelineOptions options;
  options.placements = placements(of.num_placements);
  options.split_size = split_size;
  options.schedule = of.schedule;
  options.timeout = std::chrono::seconds(60);
  return options;
}

TEST(PipelineTest, AStepHasTheBitsOfAPlainLoopInEverySchedule) {
  auto model = mlp();
  const Tensors parameters = model->parameters();
  const at::Tensor input = torch::randn({20, 10}), target = torch::randn({20, 5});
  for (const auto& [split_size, sizes] :
       {std::pair<int, Sizes>{5, {5, 5, 5, 5}}, {6, {6, 6, 6, 2}}, {20, {20}}}) {
    const auto plain = [&](const at::Tensor& x) { return model->forward(x); };
    const at::Tensor loss = plain_step(plain, input, target, sizes);
    const Tensors expected = take_gradients(parameters);
    for (const Case& each : mlp_cases()) {
      SCOPED_TRACE(base::concat(text_of(each), ", split size ", split_size));
      Pipeline pipe(cut(model, each.cuts), options_of(each, split_size));
      for (int step = 0; step < 2; ++step) {
        EXPECT_TRUE(at::equal(pipe.step(input, target, mse), loss));
        expect_same_bits(take_gradients(parameters), expected);
      }
    }
  }
}

TEST(PipelineTest, BatchNormMovesAsInAPlainLoopOverTheMicroBatches) {
  const at::Tensor input = torch::randn({14, 3, 8, 8}), target = torch::randn({14, 5});
  auto plain_model = conv_net();
  plain_step([&](const at::Tensor& x) { return plain_model->forward(x); }, input, target, {4, 4, 4, 2});
  const Tensors expected = take_gradients(plain_model->parameters());
  const std::vector<Case> cases{{Schedule::kFillDrain, 2, {6}},
                                {Schedule::kOneFOneB, 3, {3, 7}},
                                {Schedule::kInterleaved, 2, {2, 5, 8}},
                                {Schedule::kZeroBubble, 2, {7}},
                                {Schedule::kZeroBubble, 3, {4, 9}}};
  for (const Case& each : cases) {
    SCOPED_TRACE(text_of(each));
    auto model = conv_net();
    Pipeline pipe(cut(model, each.cuts), options_of(each, 4));
    pipe.step(input, target, mse);
    expect_same_bits(take_gradients(model->parameters()), expected);
    expect_same_bits(model->buffers(), plain_model->buffers(), "buffer");
  }
}

TEST(PipelineTest, UsedAsAModuleItIsPartOfItsCallersGraph) {
  auto model = mlp();
  const Tensors parameters = model->parameters();
  const at::Tensor target = torch::randn({11, 5});
  const at::Tensor input = torch::randn({11, 10}).requires_grad_();
  const at::Tensor factor = torch::ones({11, 1}).requires_grad_();
  // The plain twin: forwards, the rest of the graph, and backwards in order.
  Tensors outputs, leaves, inputs;
  for (const std::int64_t first : {0, 4, 8}) {
    inputs.push_back(input.detach().narrow(0, first, std::min<std::int64_t>(4, 11 - first)).requires_grad_());
    outputs.push_back(model->forward(inputs.back()));
    leaves.push_back(outputs.back().detach().requires_grad_());
  }
  mse(torch::cat(leaves) * factor, target).backward();
  for (std::size_t m = 0; m < outputs.size(); ++m) outputs[m].backward(leaves[m].grad());
  const Tensors expected = take_gradients(parameters);
  const at::Tensor expected_factor = factor.grad().clone();
  Tensors input_gradients;
  for (const at::Tensor& each : inputs) input_gradients.push_back(each.grad());

  for (const Case& each : mlp_cases()) {
    SCOPED_TRACE(text_of(each));
    Pipeline pipe(cut(model, each.cuts), options_of(each, 4));
    factor.mutable_grad().reset();
    input.mutable_grad().reset();
    const at::Tensor output = pipe.forward(input);
    EXPECT_TRUE(at::equal(output, torch::cat(outputs)));
    mse(output * factor, target).backward();
    expect_same_bits(take_gradients(parameters), expected);
    EXPECT_TRUE(at::equal(factor.grad(), expected_factor));
    EXPECT_TRUE(at::equal(input.grad(), torch::cat(input_gradients)));
  }
}

TEST(PipelineTest, AStepHandsTheGradientOfItsInputOn) {
  auto model = mlp();
  const at::Tensor target = torch::randn({6, 5}), base = torch::randn({6, 10});
  const at::Tensor scale = torch::ones({10}).requires_grad_();
  plain_step([&](const at::Tensor& x) { return model->forward(x); }, base * scale, target, {6});
  const at::Tensor expected = scale.grad().clone();
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    scale.mutable_grad().reset();
    Pipeline pipe(cut(model, {3}), options_of({schedule, 2, {}}, 2));
    pipe.step(base * scale, target, mse);
    EXPECT_TRUE(at::allclose(scale.grad(), expected, 1e-5, 1e-7)) << to_string(schedule);
  }
}

TEST(PipelineTest, WithGradientsOffNothingIsKept) {
  auto model = conv_net();
  Pipeline pipe(cut(model, {6}), options_of({Schedule::kOneFOneB, 2, {}}, 3));
  pipe.eval();
  EXPECT_FALSE(model->ptr(1)->is_training());
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::randn({8, 3, 8, 8});
  const at::Tensor output = pipe.forward(input);
  EXPECT_FALSE(output.requires_grad());
  EXPECT_TRUE(at::allclose(output, part(model, 0, model->size())->forward(input), 1e-5, 1e-6));
  EXPECT_EQ(pipe.last_run().peak_live, (std::vector<int>{0, 0}));
}

TEST(PipelineTest, RecomputationChangesNoBit) {
  const at::Tensor input = torch::randn({8, 3, 8, 8}), target = torch::randn({8, 5});
  const auto run = [&](bool recompute) {
    auto model = conv_net();
    auto stages = cut(model, {6});
    for (Stage& stage : stages) stage.recompute(recompute);
    Pipeline pipe(std::move(stages), options_of({Schedule::kOneFOneB, 2, {}}, 3));
    pipe.step(input, target, mse);
    Tensors all = take_gradients(model->parameters());
    for (const at::Tensor& buffer : model->buffers()) all.push_back(buffer.clone());
    return all;
  };
  expect_same_bits(run(true), run(false));
}

TEST(PipelineTest, HoldsAsManyMicroBatchesAsThePlanSays) {
  auto model = mlp();
  const at::Tensor input = torch::randn({16, 10}), target = torch::randn({16, 5});
  for (const Case& each : mlp_cases()) {
    SCOPED_TRACE(text_of(each));
    Pipeline pipe(cut(model, each.cuts), options_of(each, 2));
    pipe.step(input, target, mse);
    const Simulation expected = simulate(pipe.plan(8));
    for (std::size_t i = 0; i < expected.peak_memory.size(); ++i) {
      EXPECT_EQ(pipe.last_run().peak_live[i], static_cast<int>(expected.peak_memory[i])) << "placement " << i;
      EXPECT_EQ(pipe.last_run().actions[i].size(), expected.actions[i].size()) << "placement " << i;
    }
  }
}

TEST(PipelineTest, OneAheadComputesWheneverItCanAndChangesNoBit) {
  auto model = mlp();
  const Tensors parameters = model->parameters();
  const at::Tensor input = torch::randn({20, 10}), target = torch::randn({20, 5});
  const at::Tensor loss =
      plain_step([&](const at::Tensor& x) { return model->forward(x); }, input, target, {5, 5, 5, 5});
  const Tensors expected = take_gradients(parameters);
  for (const Case& each : mlp_cases()) {
    for (int run_ahead = 0; run_ahead < each.num_placements; ++run_ahead) {
      SCOPED_TRACE(base::concat(text_of(each), ", run_ahead ", run_ahead));
      PipelineOptions options = options_of(each, 5);
      std::vector<int> order_of_placements;
      options.run_ahead = run_ahead;
      options.on_action = [&](const Action& action) {
        order_of_placements.push_back(action.stage % each.num_placements);
      };
      Pipeline pipe(cut(model, each.cuts), options);
      EXPECT_TRUE(at::equal(pipe.step(input, target, mse), loss));
      expect_same_bits(take_gradients(parameters), expected);
      EXPECT_EQ(order_of_placements,
                serialized_order(pipe.plan(4), run_ahead, channel_capacity(pipe.plan(4))));
    }
  }
}

TEST(PipelineTest, KeepsOutputsWhereAsked) {
  auto model = mlp();
  const at::Tensor input = torch::randn({7, 10}), target = torch::randn({7, 5});
  PipelineOptions options = options_of({Schedule::kOneFOneB, 2, {}}, 3);
  Pipeline without(cut(model, {3}), options);
  without.step(input, target, mse);
  EXPECT_TRUE(without.outputs().empty());
  options.keep_outputs = true;
  Pipeline with(cut(model, {3}), options);
  with.step(input, target, mse);
  ASSERT_EQ(with.outputs().size(), 1u);
  EXPECT_FALSE(with.outputs()[0].requires_grad());
  EXPECT_TRUE(at::allclose(with.outputs()[0], model->forward(input)));
}

TEST(PipelineTest, AutocastIsTheCallers) {
  auto model = mlp();
  const Tensors parameters = model->parameters();
  const at::Tensor input = torch::randn({8, 10}), target = torch::randn({8, 5});
  const auto with_autocast = [&](const std::function<void()>& body) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    body();
    at::autocast::clear_cache();
    at::autocast::decrement_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return take_gradients(parameters);
  };
  const Tensors expected = with_autocast([&] {
    plain_step([&](const at::Tensor& x) { return model->forward(x); }, input, target.to(at::kBFloat16),
               {4, 4});
  });
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    Pipeline pipe(cut(model, {3}), options_of({schedule, 2, {}}, 4));
    expect_same_bits(with_autocast([&] { pipe.step(input, target.to(at::kBFloat16), mse); }), expected);
    EXPECT_FALSE(at::equal(expected[0], [&] {
      pipe.step(input, target, mse);
      return take_gradients(parameters)[0];
    }()));
  }
}

TEST(PipelineTest, MicroBatchesDifferByOneSampleAtMost) {
  PipelineOptions options = options_of({Schedule::kOneFOneB, 2, {}}, 0);
  options.num_micro_batches = 4;
  auto model = mlp();
  const Pipeline pipe(cut(model, {3}), options);
  EXPECT_EQ(pipe.num_micro_batches(10), 4);
  EXPECT_EQ(pipe.num_micro_batches(3), 3) << "no more than there are samples";
  Pipeline run(cut(model, {3}), options);
  const at::Tensor input = torch::randn({10, 10}), target = torch::randn({10, 5});
  run.step(input, target, mse);
  const Tensors got = take_gradients(model->parameters());
  plain_step([&](const at::Tensor& x) { return model->forward(x); }, input, target, {3, 3, 2, 2});
  expect_same_bits(got, take_gradients(model->parameters()));
}

}  // namespace
}  // namespace cohort::pipeline
