#include "cohort/rpc/dist_optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "cohort/rpc/internal/owner_optimizer.h"
#include "cohort/rpc/remote_module.h"
#include "cohort/rpc/type_text.h"
#include "tests/rpc/job.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using test::agent_of;
using test::Job;

// A layer with dropout, whose values follow from its name.
struct HalfImpl : torch::nn::Module {
  explicit HalfImpl(const std::string& name) {
    at::manual_seed(name == "encoder" ? 1 : 2);
    layer = register_module("layer", torch::nn::Linear(4, 4));
    unused = register_parameter("unused", at::ones({3}));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    dropout->eval();
  }
  at::Tensor forward(const at::Tensor& x) { return dropout(layer(x).tanh()); }
  torch::nn::Linear layer{nullptr};
  torch::nn::Dropout dropout{nullptr};
  at::Tensor unused;
};

// The modules of this process by name: the test looks at what another worker keeps.
std::mutex halves_mutex;
std::map<std::string, std::shared_ptr<HalfImpl>> halves;
std::shared_ptr<HalfImpl> make_half(const std::string& name) {
  const std::lock_guard lock(halves_mutex);
  return halves[name] = std::make_shared<HalfImpl>(name);
}
std::shared_ptr<HalfImpl> fails_to_make(const std::string& name) {
  throw DataError("test.half", "there is no " + name);
}

COHORT_REMOTE(make_half);
COHORT_REMOTE(fails_to_make);
COHORT_REMOTE_MODULE(HalfImpl);

std::map<std::string, at::Tensor> counted;  // parameters of w0, one for each trainer
at::Tensor times_counted(const std::string& trainer, const at::Tensor& x) {
  return x * counted.at(trainer);
}
RRef<at::Tensor> counted_reference(const std::string& trainer) {
  return make_rref(counted.at(trainer));
}
at::Tensor fetched(const std::string& here) {
  return agent_of(here).rpc_sync<counted_reference>("w0", here).to_here().detach();
}
COHORT_REMOTE(fetched);
COHORT_REMOTE(times_counted);
COHORT_REMOTE(counted_reference);

// Its step calls a function in the middle, and then subtracts the gradients.
std::function<void()> in_the_middle_of_a_step;
class Interrupted : public optim::Optimizer {
 public:
  explicit Interrupted(std::vector<optim::ParamGroup> groups) : Optimizer(std::move(groups)) {
    fill_options({.lr = 1});
  }
  std::string type() const override { return "interrupted"; }
  void step() override {
    in_the_middle_of_a_step();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad());
    }
  }
};
COHORT_REGISTER_OPTIMIZER("interrupted",
                          [](const optim::OptimizerOptions&, std::vector<optim::ParamGroup> groups) {
                            return std::make_unique<Interrupted>(std::move(groups));
                          });

void take_ones(const std::string& here, std::int64_t steps) {
  Agent& agent = agent_of(here);
  DistributedOptimizer optimizer({agent.rpc_sync<counted_reference>("w0", here)}, {.name = "sgd", .lr = 1});
  for (std::int64_t i = 0; i < steps; ++i) {
    dist_autograd::Context context(agent);
    dist_autograd::backward(context, {agent.rpc_sync<times_counted>("w0", here, at::ones({1})).sum()});
    optimizer.step(context);
  }
}
COHORT_REMOTE(take_ones);

class DistAutogradOptimizerTest : public testing::TestWithParam<const char*> {
 protected:
  ~DistAutogradOptimizerTest() override { halves.clear(); }
  static optim::OptimizerOptions options() {
    optim::OptimizerOptions options{.name = GetParam(), .lr = 0.05, .weight_decay = 0.01};
    if (options.name == "sgd") options.momentum = 0.9;
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Optimizers, DistAutogradOptimizerTest, testing::Values("sgd", "adamw"));

std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  return values;
}
void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}
void append(std::vector<RRef<at::Tensor>>& to, std::vector<RRef<at::Tensor>> more) {
  for (RRef<at::Tensor>& reference : more) to.push_back(std::move(reference));
}

TEST_P(DistAutogradOptimizerTest, ThreeWorkersHaveTheBitsOfOneProcess) {
  const auto schedule = optim::cosine(6);
  const at::Tensor x = at::linspace(-1, 1, 8).view({2, 4});
  // In one process, with a parameter of the trainer's own.
  HalfImpl encoder("encoder"), decoder("decoder");
  const at::Tensor scale = at::full({1}, 2.0).requires_grad_();
  std::vector<at::Tensor> all = encoder.parameters();
  for (const at::Tensor& parameter : decoder.parameters()) all.push_back(parameter);
  all.push_back(scale);
  const auto local = optim::make_optimizer(options(), {{.params = all}});
  for (std::int64_t step = 0; step < 6; ++step) {
    local->zero_grad();
    (decoder.forward(encoder.forward(x)) * scale).square().mean().backward();
    schedule->apply(*local, step);
    local->step();
  }

  Job job(3);
  const auto remote_encoder = remote_module<&make_half>(job[0], "w1", "encoder");
  const auto remote_decoder = remote_module<&make_half>(job[0], "w2", "decoder");
  EXPECT_EQ(remote_decoder.owner().name, "w2");
  const at::Tensor own_scale = at::full({1}, 2.0).requires_grad_();
  const auto run = [&](DistributedOptimizer& optimizer, std::int64_t begin, std::int64_t end) {
    for (std::int64_t step = begin; step < end; ++step) {
      dist_autograd::Context context(job[0]);
      dist_autograd::backward(
          context, {(remote_decoder.forward(remote_encoder.forward(x)) * own_scale).square().mean()});
      optimizer.apply(*schedule, step);
      optimizer.step(context);
    }
  };
  std::vector<RRef<at::Tensor>> parameters = remote_encoder.parameters();
  append(parameters, remote_decoder.parameters());
  parameters.push_back(job[0].make_rref(own_scale));
  own_scale.mutable_grad() = at::full({1}, 7.0);
  std::map<std::string, optim::OptimizerState> half_way;
  {
    DistributedOptimizer optimizer(parameters, options());
    run(optimizer, 0, 3);
    half_way = optimizer.state();
  }
  EXPECT_EQ(half_way.size(), 3U);
  EXPECT_GT(half_way.at("w1").tensors.size(), 0U);
  DistributedOptimizer resumed(parameters, options());
  resumed.load_state(half_way);
  run(resumed, 3, 6);

  expect_same(values_of(*halves.at("encoder")), values_of(encoder));
  expect_same(values_of(*halves.at("decoder")), values_of(decoder));
  EXPECT_TRUE(at::equal(own_scale, scale));
  EXPECT_EQ(own_scale.grad().item<float>(), 7) << "grad() belongs to somebody else";
  EXPECT_TRUE(at::equal(halves.at("encoder")->unused, at::ones({3}))) << "it has no gradient";
}

TEST(DistAutogradOptimizerErrorsTest, WhatOwnersThrowIsReported) {
  Job job(3);
  const auto encoder = remote_module<&make_half>(job[0], "w1", "encoder");
  const auto decoder = remote_module<&make_half>(job[0], "w2", "decoder");
  std::vector<RRef<at::Tensor>> parameters = encoder.parameters();
  COHORT_EXPECT_THROW_WITH(DistributedOptimizer({}), UsageError, "there are no parameters");
  COHORT_EXPECT_THROW_WITH(DistributedOptimizer(parameters, {.name = "sdg"}), UsageError, "Try: sgd");
  COHORT_EXPECT_THROW_WITH(DistributedOptimizer(parameters, {.extra = {{"speed", "1"}}}), ConfigError,
                           "speed");
  const DistributedOptimizer of_one(parameters, {});
  append(parameters, decoder.parameters());
  DistributedOptimizer optimizer(parameters, {.name = "sgd", .lr = 0.1});
  COHORT_EXPECT_THROW_WITH(optimizer.load_state(of_one.state()), DataError,
                           "the state is that of the workers w1, and the parameters are on w1 w2");
  dist_autograd::Context context(job[0]);
  dist_autograd::backward(context, {decoder.forward(at::ones({1, 4})).sum()});
  optimizer.set_lr(-1);
  COHORT_EXPECT_THROW_WITH(optimizer.step(context), RemoteError, "2 of 2 owners failed");
  optimizer.set_lr(0.1);
  const auto endless =
      optim::lambda([](std::int64_t) { return std::numeric_limits<double>::infinity(); }, "endless");
  COHORT_EXPECT_THROW_WITH(optimizer.apply(*endless, 0), UsageError, "endless gives a rate of inf at step 0");
  const std::vector<at::Tensor> encoder_before = values_of(*halves.at("encoder"));
  const std::vector<at::Tensor> decoder_before = values_of(*halves.at("decoder"));
  optimizer.step(context);  // no call of the context went to w1
  expect_same(values_of(*halves.at("encoder")), encoder_before);
  EXPECT_FALSE(at::equal(values_of(*halves.at("decoder")).at(1), decoder_before.at(1)));
  job.drop(1);
  COHORT_EXPECT_THROW_WITH(optimizer.step(context), PeerError, "w1");
  const auto missing = remote_module<&fails_to_make>(job[0], "w2", "third half");
  COHORT_EXPECT_THROW_WITH(missing.forward(at::ones({1, 4})), DataError, "there is no third half");
  halves.clear();
}

template <typename T>
std::string words_of() {
  TypeText text;
  describe<T>(text);
  return text.str();
}

TEST(DistAutogradOptimizerErrorsTest, SignaturesShowTheFieldsThatTravel) {
  EXPECT_EQ(words_of<optim::OptimizerOptions>(),
            "OptimizerOptions tuple<string, optional<float64>, optional<float64>, optional<float64>, "
            "optional<float64>, optional<bool>, optional<float64>, optional<float64>, optional<float64>, "
            "optional<bool>, optional<bool>, map<string, string>>");
  EXPECT_EQ(words_of<optim::OptimizerState>(),
            "OptimizerState tuple<map<string, Tensor>, map<string, float64>>");
}

TEST(DistAutogradOptimizerErrorsTest, ARemoteModuleTrainsOrEvaluates) {
  Job job(2);
  const auto encoder = remote_module<&make_half>(job[0], "w1", "encoder");
  EXPECT_EQ(encoder.parameters().size(), 3U);
  encoder.train();
  EXPECT_TRUE(halves.at("encoder")->dropout->is_training());
  const at::Tensor x = at::ones({64, 4});
  EXPECT_GT((encoder.forward(x) == 0).sum().item<std::int64_t>(), 0);
  encoder.eval();
  EXPECT_EQ((encoder.forward(x) == 0).sum().item<std::int64_t>(), 0);
  EXPECT_TRUE(at::equal(encoder.parameters().at(1).to_here(), halves.at("encoder")->layer->weight));
  halves.clear();
}

TEST(DistAutogradOptimizerErrorsTest, LoadingAStateTakesItsLearningRate) {
  counted["w1"] = at::zeros({1}).requires_grad_();
  Job job(2);
  const std::vector parameters = {job[0].rpc_sync<counted_reference>("w1", "w1")};
  const auto step = [&](DistributedOptimizer& optimizer) {  // the gradient is 1
    dist_autograd::Context context(job[0]);
    dist_autograd::backward(context, {job[0].rpc_sync<times_counted>("w1", "w1", at::ones({1})).sum()});
    optimizer.step(context);
  };
  const DistributedOptimizer slow(parameters, {.name = "sgd", .lr = 0.25});
  DistributedOptimizer fast(parameters, {.name = "sgd", .lr = 1});
  fast.set_lr(4);
  fast.load_state(slow.state());
  step(fast);
  EXPECT_EQ(counted["w1"].item<float>(), -0.25) << "the rate that was set before is dropped";
  fast.apply(*optim::constant(), 0);
  step(fast);
  EXPECT_EQ(counted["w1"].item<float>(), -0.5) << "a schedule begins at the rate of the state";
  counted.clear();
}

TEST(DistAutogradOptimizerErrorsTest, AScheduleBeginsAtTheRateOfEachOwner) {
  for (const char* owner : {"w1", "w2"}) counted[owner] = at::zeros({1}).requires_grad_();
  Job job(3);
  const std::vector parameters = {job[0].rpc_sync<counted_reference>("w1", "w1"),
                                  job[0].rpc_sync<counted_reference>("w2", "w2")};
  DistributedOptimizer optimizer(parameters, {.name = "sgd", .lr = 0.25});
  std::map<std::string, optim::OptimizerState> state = optimizer.state();
  state["w2"] = DistributedOptimizer(parameters, {.name = "sgd", .lr = 1}).state().at("w2");
  optimizer.load_state(state);
  optimizer.apply(*optim::constant(), 0);
  dist_autograd::Context context(job[0]);
  dist_autograd::backward(context, {job[0].rpc_sync<times_counted>("w1", "w1", at::ones({1})).sum(),
                                    job[0].rpc_sync<times_counted>("w2", "w2", at::ones({1})).sum()});
  optimizer.step(context);
  EXPECT_EQ(counted["w1"].item<float>(), -0.25);
  EXPECT_EQ(counted["w2"].item<float>(), -1);
  counted.clear();
}

// Each step takes 1 from the trainer's parameter: one that took another trainer's gradients, or lost its own,
// would be seen.
TEST(DistAutogradOptimizerErrorsTest, TrainersShareAnOwner) {
  for (const char* trainer : {"w1", "w2"}) counted[trainer] = at::zeros({1}).requires_grad_();
  Job job(3);
  Future<void> first = job[0].rpc_async<&take_ones>("w1", "w1", 30);
  Future<void> second = job[0].rpc_async<&take_ones>("w2", "w2", 30);
  first.get();
  second.get();
  for (const auto& [trainer, parameter] : counted) {
    EXPECT_EQ(parameter.item<float>(), -30) << trainer;
    EXPECT_FALSE(parameter.grad().defined());
  }
  job.shutdown();
  counted.clear();
}

TEST(DistAutogradOptimizerErrorsTest, AContextBelongsToTheAgentOfTheParameters) {
  Job job(1), other(1);
  counted["here"] = at::zeros({1}).requires_grad_();
  DistributedOptimizer optimizer({job[0].make_rref(counted["here"])}, {.name = "sgd", .lr = 1});
  dist_autograd::Context context(other[0]);
  COHORT_EXPECT_THROW_WITH(optimizer.step(context), UsageError, "another agent of this process");
}

// What another trainer's step changes meanwhile is seen before or after the step.
TEST(DistAutogradOptimizerErrorsTest, AParameterIsFetchedAsAWhole) {
  Job job(2);
  counted["w1"] = at::zeros({1 << 21}).requires_grad_();
  Future<void> steps = job[0].rpc_async<take_ones>("w1", "w1", 20);
  int num_values = 0;
  double last = -1;
  while (!steps.ready()) {
    const at::Tensor value = job[1].rpc_sync<fetched>("w1", "w1");
    ASSERT_EQ(value.min().item<double>(), value.max().item<double>());
    if (value[0].item<double>() != last) ++num_values;
    last = value[0].item<double>();
  }
  steps.get();
  EXPECT_GT(num_values, 2) << "steps were made meanwhile";
  job.shutdown();
}

// Whoever trains the parameter too has its grad() at any time: a loop of the owner's, or
// accumulate_into_grad() of a handler.
TEST(DistOptimizerTest, AStepLeavesTheParametersGradAlone) {
  Job job(2);
  counted["w1"] = at::full({2}, 5.0).requires_grad_();
  const at::Tensor& parameter = counted["w1"];
  in_the_middle_of_a_step = [&] {
    EXPECT_FALSE(parameter.grad().defined());
    std::thread([&] { dist_autograd::accumulate_into_grad({{parameter, at::full({2}, 3.0)}}); }).join();
  };
  {
    DistributedOptimizer optimizer({job[1].rpc_sync<counted_reference>("w0", "w1")}, {.name = "interrupted"});
    dist_autograd::Context context(job[1]);
    dist_autograd::backward(context, {job[1].rpc_sync<times_counted>("w0", "w1", at::ones({2})).sum()});
    optimizer.step(context);
    EXPECT_TRUE(at::equal(parameter.detach(), at::full({2}, 4.0))) << parameter;
  }
  ASSERT_TRUE(parameter.grad().defined());
  EXPECT_TRUE(at::equal(parameter.grad(), at::full({2}, 3.0))) << parameter.grad();
  counted.clear();
  job.shutdown();
}

TEST(DistOptimizerTest, AParameterMayGetOtherMemoryBetweenSteps) {
  Job job(2);
  counted["w1"] = at::full({2}, 5.0).requires_grad_();
  at::Tensor& parameter = counted["w1"];
  {
    DistributedOptimizer optimizer({job[1].rpc_sync<counted_reference>("w0", "w1")},
                                   {.name = "sgd", .lr = 1});
    for (int step = 0; step < 2; ++step) {
      dist_autograd::Context context(job[1]);
      dist_autograd::backward(context, {job[1].rpc_sync<times_counted>("w0", "w1", at::ones({2})).sum()});
      parameter.set_data(at::full({2}, 7.0));
      const auto version = parameter._version();
      optimizer.step(context);
      EXPECT_TRUE(at::equal(parameter.detach(), at::full({2}, 6.0))) << parameter;
      EXPECT_GT(parameter._version(), version) << "autograd sees the change";
    }
  }
  counted.clear();
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
