#include "cohort/elastic/run.h"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cohort/elastic/state_of.h"
#include "cohort/optim/sgd.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

/// A process that is alone in each generation, and enters the next one when it has to.
class LoneSession : public Session {
 public:
  int virtual_ranks() const override { return 1; }
  void set_state(StateAccess) override {}
  GenerationInfo enter(std::uint64_t committed_steps) override {
    info_ = {.generation = info_.generation + 1, .steps = committed_steps};
    return info_;
  }
  bool must_enter() const override { return false; }
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return nullptr; }
  void begin_changes() override {}
  void commit(std::uint64_t steps) override { info_.steps = steps; }
  GenerationInfo finish() override { return info_; }

 private:
  GenerationInfo info_;
};

struct NormedNet : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(3, 4));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
};

/// Five steps of a model, with what happens between the average and the changes of a step. Returns its
/// tensors.
std::vector<at::Tensor> train(const std::function<void(const StepContext& context)>& before_changes,
                              RunOptions options = {}) {
  at::manual_seed(1);
  const auto net = std::make_shared<NormedNet>();
  const auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
  parallel::VirtualRankSync sync({}, {.num_virtual_ranks = 1});
  sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
  options.total_steps = 5;
  options.session = std::make_shared<LoneSession>();
  options.sync = &sync;
  run(options, state_of(net, optimizer), [&](StepContext& context) {
    sync.begin_step();
    at::manual_seed(100 + context.step());
    sync.begin_share(0, 8);
    net->norm->forward(net->linear->forward(at::rand({8, 3}))).sin().sum().backward();
    sync.end_shares();
    sync.average(*optimizer, 8, true);
    before_changes(context);
    context.begin_changes();
    optimizer->step();
  });
  return state_of(net, optimizer).save().tensors;
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

// A transfer of the step's own, as of metrics, follows the average. Running statistics are of the step
// already.
TEST(ElasticRunTest, AStepWhoseOwnTransferFailsIsMadeAgainFromItsBegin) {
  const auto expected = train([](const StepContext&) {});
  bool has_failed = false;
  const auto got = train([&](const StepContext& context) {
    if (context.step() == 2 && !std::exchange(has_failed, true))
      throw GenerationEnded("test", "a process is lost");
  });
  EXPECT_TRUE(has_failed);
  expect_same(got, expected);
}

TEST(ElasticRunTest, AGenerationThatEndsInACallbackIsEnteredAgain) {
  const auto expected = train([](const StepContext&) {});
  std::vector<std::uint64_t> entered, committed;
  bool has_failed_on_enter = false, has_failed_on_commit = false;
  RunOptions options;
  options.on_enter = [&](const GenerationInfo& info) {
    entered.push_back(info.generation);
    if (!std::exchange(has_failed_on_enter, true)) throw GenerationEnded("test", "a process is lost");
  };
  options.on_commit = [&](const GenerationInfo& info) {
    if (info.steps == 3 && !std::exchange(has_failed_on_commit, true))
      throw GenerationEnded("test", "a process is lost");
    committed.push_back(info.steps);
  };
  expect_same(train([](const StepContext&) {}, options), expected);
  EXPECT_EQ(entered, (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_EQ(committed, (std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
}

// Others may be there that have made all steps, and make no group any more.
TEST(ElasticRunTest, AProcessThatHasAllStepsWhenItEntersDoesNotCallOnEnter) {
  int num_calls = 0;
  RunOptions options;
  options.on_enter = [&](const GenerationInfo&) { ++num_calls; };
  options.first_step = 5;
  train([](const StepContext&) { ADD_FAILURE() << "a step"; }, options);
  EXPECT_EQ(num_calls, 0);
}

}  // namespace
}  // namespace cohort::elastic
