// Agents beside process groups, and one after the other in a process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/init.h"
#include "cohort/parallel/distributed.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/init.h"
#include "tests/support/environment.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

at::Tensor plus_one(const at::Tensor& x) {
  return x + 1;
}
at::Tensor plus_one_later(const at::Tensor& x, int ms) {
  base::sleep(milliseconds(ms), test::patience());
  return x + 1;
}
COHORT_REMOTE(plus_one);
COHORT_REMOTE(plus_one_later);

int own_rank() {
  return std::atoi(std::getenv("RANK"));
}
std::string other_worker() {
  return "rank/" + std::to_string(1 - own_rank());
}
void expect_calls() {
  EXPECT_TRUE(at::equal(rpc_sync<plus_one>(other_worker(), at::ones({2})), at::full({2}, 2.0)));
}
void expect_collectives(const comm::Group& group) {
  at::Tensor sum = at::full({3}, own_rank() + 1.0);
  group.all_reduce(sum).wait();
  EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0)));
}

TEST(AgentAfterGroupChild, DISABLED_Rank) {
  const comm::Group group = comm::init_process_group({.backend = "gloo", .timeout = seconds(30)});
  for (int round = 0; round < 2; ++round) {
    init_rpc("rank/" + std::to_string(own_rank()), {.group = group});
    Future<at::Tensor> call = rpc_async<plus_one_later>(other_worker(), at::ones({2}), 100);
    expect_collectives(group);
    EXPECT_TRUE(at::equal(call.get(), at::full({2}, 2.0)));
    expect_calls();
    shutdown(seconds(30));
    COHORT_EXPECT_THROW_WITH(agent(), UsageError, "this process has no agent");
    group.barrier();
  }
}

TEST(AgentAndGroupTest, AnAgentMayFollowAGroupAndAnotherAgent) {
  test::RankProcesses ranks("AgentAfterGroupChild", 2);
  EXPECT_EQ(ranks.wait(seconds(40)), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
}

// Rank 0 waits for the group while it answers a call of rank 1.
TEST(GroupAfterAgentChild, DISABLED_Rank) {
  init_rpc("rank/" + std::to_string(own_rank()));
  if (own_rank() == 1) {
    EXPECT_TRUE(at::equal(rpc_sync<plus_one_later>("rank/0", at::ones({2}), 300), at::full({2}, 2.0)));
  }
  {
    const comm::Group group = comm::init_process_group(
        {.init_method = "file://" + std::string(std::getenv("TEST_FOLDER")) + "/group",
         .backend = "gloo",
         .rank = own_rank(),
         .world_size = 2,
         .timeout = seconds(30)});
    expect_calls();
    expect_collectives(group);
    expect_calls();
    group.barrier();
  }
  shutdown(seconds(30));
}

TEST(AgentAndGroupTest, AGroupMayFollowAnAgentWhileACallRuns) {
  test::RankProcesses ranks("GroupAfterAgentChild", 2);
  EXPECT_EQ(ranks.wait(seconds(40)), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
}

// What rank `rank` computes: a layer of its own of what the other rank's parameter makes of its input.
at::Tensor& scale_of_rank() {
  static at::Tensor scale = at::full({4}, 2.0 + own_rank()).requires_grad_();
  return scale;
}
at::Tensor scaled_by_rank(const at::Tensor& x) {
  return x * scale_of_rank();
}
at::Tensor gradient_of_scale(dist_autograd::ContextId context) {
  return dist_autograd::get_gradients(context).at(0).second;
}
COHORT_REMOTE(scaled_by_rank);
COHORT_REMOTE(gradient_of_scale);

at::Tensor input_of_rank(int rank) {
  return at::linspace(-1, 1, 8).view({2, 4}) + rank;
}
torch::nn::Linear layer_of_ranks() {
  at::manual_seed(3);
  return torch::nn::Linear(4, 2);
}

// A backward through calls averages the gradients of a DistributedDataParallel model. Those of calls stay the
// caller's own.
TEST(DdpInContextChild, DISABLED_Rank) {
  const comm::Group group = comm::init_process_group({.backend = "gloo", .timeout = seconds(30)});
  init_rpc("rank/" + std::to_string(own_rank()), {.group = group});
  {
    parallel::DistributedDataParallel<torch::nn::Linear> layer(layer_of_ranks(), group);
    const auto loss_of = [](auto& of, const at::Tensor& x) { return of.forward(x).square().sum(); };
    for (int step = 0; step < 2; ++step) {
      for (const at::Tensor& parameter : layer->parameters()) parameter.mutable_grad().reset();
      dist_autograd::Context context;
      const at::Tensor x = rpc_sync<scaled_by_rank>(other_worker(), input_of_rank(own_rank()));
      dist_autograd::backward(context, {loss_of(layer, x)}, {.into_grad = true});
      torch::nn::Linear alone = layer_of_ranks();
      at::Tensor of_call;
      for (int rank = 0; rank < 2; ++rank) {
        const at::Tensor scale = at::full({4}, 3.0 - rank).requires_grad_();
        (loss_of(*alone, input_of_rank(rank) * scale) / 2).backward();
        if (rank == own_rank()) of_call = scale.grad() * 2;
      }
      EXPECT_TRUE(at::allclose(layer->weight.grad(), alone->weight.grad()));
      EXPECT_TRUE(at::allclose(layer->bias.grad(), alone->bias.grad()));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::allclose(rpc_sync<gradient_of_scale>(other_worker(), context.id()), of_call));
    }
    group.barrier();
  }
  shutdown(seconds(30));
}

TEST(AgentAndGroupTest, ABackwardThroughCallsAveragesTheGradientsOfADistributedModel) {
  test::RankProcesses ranks("DdpInContextChild", 2);
  EXPECT_EQ(ranks.wait(seconds(40)), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
}

TEST(AgentAndGroupTest, AStartWithoutARankIsAnError) {
  const test::ScopedEnv size("WORLD_SIZE", "2"), rank("RANK", std::nullopt);
  COHORT_EXPECT_THROW_WITH(init_rpc("rank/0"), Error, "WORLD_SIZE is set but RANK is not");
  COHORT_EXPECT_THROW_WITH(agent(), UsageError, "this process has no agent");
}

}  // namespace
}  // namespace cohort::rpc
