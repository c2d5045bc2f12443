// A rank that stands still (SIGSTOP) at each collective of this module: the other's error comes in time and
// names it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/distributed.h"
#include "cohort/parallel/power_sgd.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"

namespace cohort::parallel {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Linear = torch::nn::Linear;
using Ddp = DistributedDataParallel<Linear>;

constexpr milliseconds kTime(500);

// What is done together, in a group of its own, and returns the call during which the other rank stands
// still.
using Prepare = std::function<std::function<void()>(const comm::Group& group)>;

std::shared_ptr<Ddp> ddp(const comm::Group& group, const DistributedOptions& options = {}) {
  return std::make_shared<Ddp>(Linear(4, 4), group, options);
}

at::Tensor loss_of(Ddp& model) {
  return model.forward(torch::ones({2, 4})).sum();
}

// A backward with `options`, after one that all ranks make.
Prepare backward_with(const DistributedOptions& options) {
  return [options](const comm::Group& group) -> std::function<void()> {
    const auto model = ddp(group, options);
    loss_of(*model).backward();
    return [model] { loss_of(*model).backward(); };
  };
}

std::vector<std::pair<const char*, Prepare>> cases() {
  DistributedOptions unused, compressed;
  const auto of_c10d = [](const comm::Group& group) {
    DistributedOptions options;
    options.hook = future_hook([group](c10d::GradBucket& bucket) {
      std::vector<at::Tensor> list{bucket.getBuffer()};
      return group.process_group()->allreduce(list)->getFuture();
    });
    return options;
  };
  unused.find_unused_parameters = true;
  compressed.hook = power_sgd_hook({.start_iter = 0, .min_compression_rate = 1});
  return {
      {"the first backward",
       [](const comm::Group& group) {
         const auto model = ddp(group);
         return [model] { loss_of(*model).backward(); };
       }},
      {"a later backward", backward_with({})},
      {"unused parameters", backward_with(unused)},
      {"PowerSGD", backward_with(compressed)},
      {"a hook of c10d's",
       [of_c10d](const comm::Group& group) { return backward_with(of_c10d(group))(group); }},
      {"the constructor", [](const comm::Group& group) { return [group] { ddp(group); }; }},
      {"synchronize_buffers",
       [](const comm::Group& group) {
         const auto model = std::make_shared<DistributedDataParallel<torch::nn::BatchNorm1d>>(
             torch::nn::BatchNorm1d(4), group, DistributedOptions{});
         return [model] { model->synchronize_buffers(); };
       }},
      {"a step without samples",
       [](const comm::Group& group) {
         const auto model = ddp(group);
         return [model] { model->step_without_samples(); };
       }},
      {"join, as it ends",
       [](const comm::Group& group) {
         const auto model = ddp(group);
         return [model] { model->join([] {}); };
       }},
      {"join, in a step",
       [](const comm::Group& group) {
         const auto model = ddp(group);
         return [model] { model->join([&] { loss_of(*model).backward(); }); };
       }},
      {"average",
       [](const comm::Group& group) {
         return [group] {
           const at::Tensor parameter = torch::ones({4}, torch::requires_grad());
           parameter.sum().backward();
           GradientAverager(group).average(std::span(&parameter, 1), 1);
         };
       }},
      {"sparse gradients",
       [](const comm::Group& group) -> std::function<void()> {
         using Model = DistributedDataParallel<torch::nn::Embedding>;
         const auto model =
             std::make_shared<Model>(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true)),
                                     group, DistributedOptions{});
         const auto step = [model] { model->forward(torch::tensor({1, 2})).sum().backward(); };
         step();
         return step;
       }},
      {"batch norm, forward",
       [](const comm::Group& group) -> std::function<void()> {
         const SyncBatchNorm1d norm(4, group);
         return [norm] { norm.ptr()->forward(torch::randn({3, 4})); };
       }},
      {"batch norm, backward",
       [](const comm::Group& group) -> std::function<void()> {
         const SyncBatchNorm1d norm(4, group);
         const at::Tensor out = norm.ptr()->forward(torch::randn({3, 4}, torch::requires_grad()));
         return [out] { out.sum().backward(); };
       }},
  };
}

TEST(StoppedRankChild, DISABLED_Rank) {
  comm::Group world =
      comm::init_process_group({.backend = std::getenv("TEST_BACKEND"), .timeout = seconds(40)});
  std::vector<std::pair<const char*, std::function<void()>>> calls;
  std::vector<comm::Group> groups;
  for (const auto& [name, prepare] : cases()) {
    groups.push_back(
        world.subgroup({0, 1}, {.timeout = seconds(40), .check_consistency = comm::ConsistencyCheck::kOff}));
    calls.emplace_back(name, prepare(groups.back()));
  }
  for (const comm::Group& group : groups) group.shared_state()->timeout = kTime;
  world.barrier();
  if (world.rank() == 1) ::raise(SIGSTOP);
  for (const auto& [name, call] : calls) {
    const base::Deadline waited(kTime);
    try {
      call();
      ADD_FAILURE() << name << " came to an end";
    } catch (const std::exception& error) {
      EXPECT_LT(waited.elapsed(), kTime + test::deadline_slack()) << name << ": " << error.what();
      const std::string text = error.what();
      EXPECT_NE(text.find("rank 1 "), std::string::npos) << name << ": " << text;
    }
  }
  std::fprintf(stderr, "has seen all\n");
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(StoppedRankTest, EveryCollectiveEndsAtItsDeadlineAndNamesIt) {
  for (const char* backend : {"shm", "gloo"}) {
    test::RankProcesses ranks("StoppedRankChild", 2, {{"TEST_BACKEND", backend}});
    ranks.wait_for(0, "has seen all");
    EXPECT_EQ(ranks.output(0).find("Failure"), std::string::npos) << backend << ": " << ranks.output(0);
  }
}

}  // namespace
}  // namespace cohort::parallel
