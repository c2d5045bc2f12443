#include "cohort/pipeline/balance.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/placement.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/synthetic.h"
#include "tests/pipeline/nets.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

std::vector<LayerProfile> layers(const std::vector<double>& times) {
  std::vector<LayerProfile> result;
  for (const double time : times) result.push_back({"layer", time, time, time, 100, 10});
  return result;
}

TEST(BalanceTest, MakesTheSlowestStageAsFastAsItCanBe) {
  const Balance even = balance(layers({1, 1, 1, 1, 1, 1}), {.num_stages = 3});
  EXPECT_EQ(even.cuts, (std::vector<std::size_t>{0, 2, 4, 6}));
  EXPECT_DOUBLE_EQ(even.evenness, 1);
  EXPECT_DOUBLE_EQ(even.step, (8 + 2) * 6.0) << "the formula of 1f1b";
  const Balance uneven = balance(layers({5, 1, 1, 1, 1, 3}), {.num_stages = 2});
  EXPECT_EQ(uneven.cuts, (std::vector<std::size_t>{0, 2, 6}));
  EXPECT_DOUBLE_EQ(uneven.costs[0].forward, 6);
  EXPECT_DOUBLE_EQ(uneven.evenness, 1);
  EXPECT_NE(uneven.text().find("stage 1: layers 2 to 5, forward 6.000 ms, backward 12.000 ms"),
            std::string::npos)
      << uneven.text();
}

// Each time the registry is asked it copies this.
struct CountedOrder {
  CountedOrder() = default;
  CountedOrder(const CountedOrder& /*from*/) { ++copies; }
  CountedOrder& operator=(const CountedOrder&) = delete;
  ActionOrder operator()(const PlaceInPipeline& place) const {
    return ActionOrder{.group = place.num_micro_batches, .warm_up = place.num_micro_batches};
  }
  static inline int copies = 0;
};
COHORT_REGISTER_PIPELINE_SCHEDULE("counted_order", {.order = CountedOrder()});

TEST(BalanceTest, AsksForItsScheduleNoMoreOftenForMoreLayers) {
  const auto copies_for = [](std::size_t num_layers) {
    const int before = CountedOrder::copies;
    balance(layers(std::vector<double>(num_layers, 1)),
            {.num_stages = 2, .num_micro_batches = 2, .schedule = Schedule("counted_order")});
    return CountedOrder::copies - before;
  };
  const int for_few = copies_for(3);
  EXPECT_GT(for_few, 0);
  EXPECT_EQ(copies_for(12), for_few);
}

TEST(BalanceTest, StaysWithinTheMemoryOfAPlacement) {
  auto list = layers({1, 1, 1, 1});
  list[0].parameter_bytes = list[1].parameter_bytes = 1000000;
  BalanceOptions options{.num_stages = 2, .num_micro_batches = 4, .schedule = Schedule::kFillDrain};
  EXPECT_EQ(balance(list, options).cuts, (std::vector<std::size_t>{0, 2, 4}));
  options.max_bytes = 4000000;  // parameters, gradients and the optimizer of one of the large layers
  const Balance small = balance(list, options);
  EXPECT_EQ(small.cuts, (std::vector<std::size_t>{0, 1, 4}));
  EXPECT_DOUBLE_EQ(small.placement_bytes[0], 3e6 + 4 * 100);
  options.max_bytes = 0;
  options.by_bytes = true;
  EXPECT_EQ(balance(list, options).cuts, small.cuts) << "even in bytes";
  options.by_bytes = false;
  options.max_bytes = 1000;
  COHORT_EXPECT_THROW_WITH(balance(list, options), UsageError,
                           "no cut fits into 1000 bytes per placement; the most even one needs 6000800");
}

TEST(BalanceTest, RejectsMoreStagesThanLayers) {
  COHORT_EXPECT_THROW_WITH(balance(layers({1, 1}), {.num_stages = 3}), UsageError,
                           "got 2 layers for 3 stages");
}

TEST(BalanceTest, ProfilesLayersWithoutATrace) {
  auto model = conv_net();
  const Tensors buffers = [&] {
    Tensors copies;
    for (const at::Tensor& buffer : model->buffers()) copies.push_back(buffer.clone());
    return copies;
  }();
  model->parameters()[0].mutable_grad() = torch::ones_like(model->parameters()[0]);
  const auto split = profile_layers(model, torch::randn({4, 3, 8, 8}), {.repeats = 2, .split = true});
  EXPECT_NE(split[0].weight_gradient, split[0].input_gradient);
  const auto profiles = profile_layers(model, torch::randn({4, 3, 8, 8}), {.repeats = 2});
  EXPECT_EQ(profiles[0].weight_gradient, profiles[0].input_gradient) << "half of the backward each";
  ASSERT_EQ(profiles.size(), model->size());
  EXPECT_EQ(profiles[0].parameter_bytes, 8 * 3 * 9 * 4);
  EXPECT_EQ(profiles[2].parameter_bytes, 0);
  EXPECT_GE(profiles[0].activation_bytes, 4 * 8 * 8 * 8 * 4) << "its output at the least";
  for (const LayerProfile& each : profiles) EXPECT_GT(each.forward, 0);
  expect_same_bits(model->buffers(), buffers, "buffer");
  EXPECT_TRUE(at::equal(model->parameters()[0].grad(), torch::ones_like(model->parameters()[0])));
  EXPECT_FALSE(model->parameters()[1].grad().defined());
  const Balance cut = balance(profiles, {.num_stages = 2});
  const auto stages = cut.stages(Stage(model));
  EXPECT_EQ(stages[0].layers().size() + stages[1].layers().size(), model->size());
  COHORT_EXPECT_THROW_WITH(profile_layers(torch::nn::Linear(2, 2), torch::randn({1, 2})), UsageError,
                           "Linear is no list of layers");
  COHORT_EXPECT_THROW_WITH(stages[0].part(0, 99), UsageError, "got layers 0 to 99 of Sequential");
}

// A layer that says who was in it, and expects one at a time.
struct WatchedImpl : torch::nn::Module {
  explicit WatchedImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  at::Tensor forward(const at::Tensor& x) {
    const std::unique_lock alone(mutex, std::try_to_lock);
    EXPECT_TRUE(alone.owns_lock()) << "two placements in one layer";
    threads.insert(std::this_thread::get_id());
    return torch::dropout(x * weight, 0.5, true);
  }
  at::Tensor weight;
  std::mutex mutex;
  std::set<std::thread::id> threads;
};
TORCH_MODULE(Watched);

TEST(BalanceTest, ProfilesLayersWhileOtherPlacementsRunThemToo) {
  const at::Tensor weight = torch::ones({4});
  const Watched first(weight), second(weight);
  torch::nn::Sequential model(first, torch::nn::ReLU(), second);
  const at::Tensor batch = torch::randn({2, 4});
  torch::manual_seed(3);
  const at::Tensor next = torch::rand({5});
  torch::manual_seed(3);
  const auto profiles =
      profile_layers(model, batch, {.placements = base::parse_placements("cpu:0/a,cpu:0/b")});
  EXPECT_TRUE(at::equal(torch::rand({5}), next)) << "LibTorch's generator has moved";
  EXPECT_EQ(first->threads.size(), 2U);
  EXPECT_EQ(second->threads.size(), 2U);
  EXPECT_EQ(profiles.size(), 3U);
  EXPECT_FALSE(weight.grad().defined());
  COHORT_EXPECT_THROW_WITH(
      profile_layers(model, torch::randn({2, 5}), {.placements = base::parse_placements("cpu:0/a,cpu:0/b")}),
      c10::Error, "size");
  COHORT_EXPECT_THROW_WITH(profile_layers(model, torch::randn({2, 4}), {.placements = {}}), UsageError,
                           "got no placement");
}

// The calling thread is the placement that is timed, and the other one is stuck in the layer.
TEST(BalanceTest, ALayerThatAnotherPlacementIsStuckInIsATimeout) {
  using Layer = std::function<at::Tensor(at::Tensor)>;
  const auto gate = std::make_shared<cohort::test::Gate>();
  const auto timed = parallel::PlacementWorker::of(base::Placement::parse("cpu:0/a"));
  const Layer stuck = [gate, timed](const at::Tensor& x) {
    if (!timed->is_current()) gate->wait();
    return x * 2;
  };
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Functional(stuck));
  constexpr std::chrono::milliseconds kTime(1200);
  const at::Tensor input = torch::randn({2, 4});
  timed
      ->submit("profile",
               [&] {
                 const base::Deadline waited(kTime);
                 COHORT_EXPECT_THROW_WITH(
                     profile_layers(model, input,
                                    {.placements = base::parse_placements("cpu:0/a,cpu:0/b"),
                                     .repeats = 1000000,
                                     .timeout = kTime}),
                     TimeoutError, "ms for layer 1");
                 EXPECT_LT(waited.elapsed(), 2 * kTime + cohort::test::deadline_slack());
               })
      .get(base::Deadline(std::chrono::seconds(30)));
  gate->open();
  // What the stuck placement runs holds the input, and must not be at it when the process ends.
  cohort::test::wait_until([&] { return input.use_count() == 1 && input.storage().use_count() == 1; });
}

TEST(BalanceTest, TunesTheSplitSizeWithoutATrace) {
  auto model = conv_net();
  const at::Tensor mean = model->buffers()[0].clone();
  PipelineOptions options;
  options.placements = placements(2);
  const at::Tensor input = torch::randn({8, 3, 8, 8}), target = torch::randn({8, 5});
  torch::manual_seed(3);
  const at::Tensor next = torch::rand({5});
  torch::manual_seed(3);
  const auto result = tune(cut(model, {6}), options, {input}, {target},
                           [](const Tensors& out, const Tensors& wanted) {
                             return mse(at::dropout(out.at(0), 0.5, true), wanted.at(0));
                           },
                           {.repeats = 1});
  EXPECT_TRUE(at::equal(torch::rand({5}), next)) << "the caller's generator has moved";
  ASSERT_EQ(result.points.size(), 4u) << "1, 2, 4, 8";
  EXPECT_EQ(result.points[3].split_size, 8);
  EXPECT_NE(result.text().find("best"), std::string::npos);
  EXPECT_TRUE(at::equal(model->buffers()[0], mean));
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

// Draws in every way, and has another thread of the program draw meanwhile.
struct DrawingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    std::thread([this] {
      const std::lock_guard lock(mutex);
      thread_draws.push_back(torch::rand({1}).item<float>());
    }).join();
    const at::Tensor more = at::rand(x.sizes(), at::detail::getDefaultCPUGenerator());
    return torch::dropout(x * weight, 0.5, true) + more;
  }
  at::Tensor weight = register_parameter("weight", torch::ones({4}));
  std::mutex mutex;
  std::vector<float> thread_draws;  // under mutex
};
TORCH_MODULE(Drawing);

TEST(BalanceTest, OtherThreadsMissNoNumberAndGetNoneTwice) {
  Drawing first, last;
  torch::nn::Sequential model(first, last);
  const at::Tensor batch = torch::randn({4, 4});
  PipelineOptions options;
  options.placements = placements(2);
  const auto profiles = [&] { profile_layers(model, batch, {.placements = placements(2), .repeats = 2}); };
  const auto tunes = [&] {
    tune(cut(model, {1}), options, {batch}, {batch},
         [](const Tensors& out, const Tensors& wanted) { return mse(out.at(0), wanted.at(0)); },
         {.split_sizes = {2}, .repeats = 1});
  };
  for (const std::function<void()>& call : {std::function<void()>(profiles), std::function<void()>(tunes)}) {
    torch::manual_seed(3);
    call();
    std::vector<float> got{torch::rand({1}).item<float>()};
    for (Drawing each : {first, last}) {
      got.insert(got.end(), each->thread_draws.begin(), each->thread_draws.end());
      each->thread_draws.clear();
    }
    EXPECT_GT(got.size(), 6U);
    torch::manual_seed(3);
    std::vector<float> expected;
    while (expected.size() < got.size()) expected.push_back(torch::rand({1}).item<float>());
    EXPECT_EQ(got.front(), expected.back()) << "the next number of the caller";
    std::ranges::sort(got);
    std::ranges::sort(expected);
    EXPECT_EQ(got, expected);
  }
}

TEST(BalanceTest, SleepingLayersHaveTheGradientsOfTheirKind) {
  SleepingLayer layer(SleepTimes{});
  const at::Tensor input = torch::randn({3, 2}).requires_grad_();
  layer->forward(input).sum().backward();
  EXPECT_TRUE(at::equal(input.grad(), torch::ones({3, 2})));
  EXPECT_TRUE(at::equal(layer->parameters()[0].grad(), torch::zeros({1})));
}

}  // namespace
}  // namespace cohort::pipeline
