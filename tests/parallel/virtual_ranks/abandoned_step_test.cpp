// A step of virtual ranks in which a transfer fails, at each place where one can.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

/// Of which the transfer with a number fails, as if another process were gone.
class FailingExchange : public SliceExchange {
 public:
  FailingExchange(comm::Group group, int left)
      : exchange_(make_slice_exchange(std::move(group))), left_(left) {}
  int rank() const override { return exchange_->rank(); }
  int size() const override { return exchange_->size(); }
  void begin_step() override { ++num_steps; }
  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override {
    return failing(exchange_->all_to_all(std::move(output), input, output_bytes, input_bytes));
  }
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override {
    return failing(exchange_->all_gather(std::move(output), input));
  }
  Transfer broadcast(at::Tensor bytes) override { return failing(exchange_->broadcast(std::move(bytes))); }

  int num_steps = 0;

 private:
  Transfer failing(Transfer transfer) {
    return [this, transfer = std::move(transfer)] {
      transfer();
      if (left_-- == 0) throw CommError("test", "a process is gone");
    };
  }
  std::shared_ptr<SliceExchange> exchange_;
  int left_;
};

struct NormedNet : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 3));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(3));
};

struct NormedStep {
  explicit NormedStep(VirtualRankSync& sync) : sync(sync) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) {
      parameter.copy_(at::arange(parameter.numel(), at::kFloat).sin().view(parameter.sizes()));
    }
    optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
    sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
  }
  void run() {
    sync.begin_step();
    const ShareRange range = sync.shares();
    for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
      sync.begin_share(share, 4);
      const bool is_last = share + 1 == range.first + range.count;
      if (is_last) sync.end_shares();
      const at::Tensor x = at::arange(24, at::kFloat).add(static_cast<double>(share)).sin().view({4, 6});
      const at::Tensor loss = net->norm->forward(net->linear->forward(x)).sin().sum();
      if (is_last) sync.prepare(*optimizer, 4, true);
      loss.backward();
    }
    sync.average(*optimizer, 4, true);
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : net->parameters()) gradients.push_back(parameter.grad().clone());
    return gradients;
  }

  VirtualRankSync& sync;
  std::shared_ptr<NormedNet> net = std::make_shared<NormedNet>();
  std::shared_ptr<optim::SGD> optimizer;
};

TEST(AbandonedStepTest, NothingHasChangedAndTheStepIsMadeAgain) {
  VirtualRankSync alone({}, {.num_virtual_ranks = 3, .bucket_bytes = 40});
  NormedStep undisturbed(alone);
  undisturbed.run();
  const std::vector<at::Tensor> expected = undisturbed.gradients();
  const at::Tensor begin = NormedStep(alone).net->norm->running_mean.clone();
  bool has_ended = false;
  for (int number = 0; !has_ended; ++number) {
    ASSERT_LT(number, 50);
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      SCOPED_TRACE(number);
      VirtualRankSync sync({}, {.num_virtual_ranks = 3, .bucket_bytes = 40});
      NormedStep steps(sync);
      const auto exchange = std::make_shared<FailingExchange>(group, number);
      sync.set_exchange(exchange);
      bool has_failed = false;
      try {
        steps.run();
      } catch (const CommError&) {
        has_failed = true;
      }
      EXPECT_EQ(exchange->num_steps, 1);
      if (!has_failed) sync.commit_step();
      sync.abandon_step();
      const at::Tensor mean = steps.net->norm->running_mean;
      if (!has_failed) {  // there are no more transfers: the step stays
        EXPECT_TRUE(at::equal(mean, undisturbed.net->norm->running_mean));
        if (group.rank() == 0) has_ended = true;
        return;
      }
      EXPECT_TRUE(at::equal(mean, begin));
      for (const at::Tensor& parameter : steps.net->parameters()) EXPECT_FALSE(parameter.grad().defined());
      sync.set_exchange(nullptr);
      steps.run();
      const std::vector<at::Tensor> found = steps.gradients();
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i]));
      EXPECT_TRUE(at::equal(mean, undisturbed.net->norm->running_mean));
    });
    EXPECT_TRUE(number > 3 || !has_ended) << "a header, covers, sums and buffers travel";
  }
}

// What the caller exchanges after average() may fail too.
TEST(AbandonedStepTest, AStepThatHasItsAverageIsGivenUpUntilItIsCommitted) {
  VirtualRankSync sync({}, {.num_virtual_ranks = 2});
  NormedStep steps(sync);
  const at::Tensor begin = steps.net->norm->running_mean.clone();
  steps.run();
  const at::Tensor end = steps.net->norm->running_mean.clone();
  ASSERT_FALSE(at::equal(begin, end));
  sync.abandon_step();
  EXPECT_TRUE(at::equal(steps.net->norm->running_mean, begin));
  sync.abandon_step();
  steps.run();
  sync.commit_step();
  sync.abandon_step();
  EXPECT_TRUE(at::equal(steps.net->norm->running_mean, end));
}

// As a GAN does, whose optimizers take turns.
TEST(AbandonedStepTest, AStepWithTheAverageOfOneOptimizerOfTwoIsCommittedAsAWhole) {
  VirtualRankSync sync({}, {.num_virtual_ranks = 1});
  NormedStep steps(sync);
  const auto other = std::make_shared<torch::nn::LinearImpl>(2, 2);
  const auto second = std::make_shared<optim::SGD>(other->parameters(), optim::SGDOptions(0.1));
  sync.begin({.modules = {{"", steps.net}},
              .optimizers = {{"", steps.optimizer, nullptr}, {"second", second, nullptr}}});
  steps.run();
  const at::Tensor end = steps.net->norm->running_mean.clone();
  sync.commit_step();
  sync.abandon_step();
  EXPECT_TRUE(at::equal(steps.net->norm->running_mean, end));
}

}  // namespace
}  // namespace cohort::parallel
