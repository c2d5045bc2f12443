// What handlers draw within a context that has a key.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/dist_optimizer.h"
#include "tests/rpc/job.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextOptions;
using test::agent_of;
using test::Job;

constexpr std::int64_t kNumPlaces = 3;

std::string random_place(std::int64_t place, std::int64_t num_workers) {
  return "w" + std::to_string(place % num_workers);
}
at::Tensor drop_half(const at::Tensor& x) {
  return at::dropout(x, 0.5, /*train=*/true);
}
// Drops here, then at the next place, then here again.
at::Tensor drop_through(std::int64_t place, std::int64_t num_workers, const at::Tensor& x) {
  const at::Tensor first = drop_half(x);
  Agent& agent = agent_of(random_place(place, num_workers));
  const at::Tensor second = agent.rpc_sync<drop_half>(random_place(place + 1, num_workers), x);
  return at::cat({first, second, drop_half(x)});
}
at::Tensor dropped_parameter;
RRef<at::Tensor> dropped_parameter_reference() {
  return make_rref(dropped_parameter);
}

COHORT_REMOTE(drop_half);
COHORT_REMOTE(drop_through);
COHORT_REMOTE(dropped_parameter_reference);

at::Tensor sixty_four_ones() {
  return at::ones({64}).requires_grad_();
}

// All that the handlers of a program draw.
at::Tensor drawn(Job& job, std::int64_t num_workers, const ContextOptions& options) {
  Agent& agent = job[0];
  const at::Tensor x = sixty_four_ones();
  Context context(agent, options);
  std::vector<Future<at::Tensor>> pending;
  std::vector<at::Tensor> results;
  for (std::int64_t i = 0; i < 2 * kNumPlaces; ++i) {
    const std::string worker = random_place(i, num_workers);
    pending.push_back(agent.rpc_async<drop_through>(worker, i % num_workers, num_workers, x));
    results.push_back(agent.remote<drop_half>(worker, x).to_here());
    const at::NoGradGuard no_grad;
    results.push_back(agent.rpc_sync<drop_half>(worker, x));
  }
  for (Future<at::Tensor>& result : pending) results.push_back(result.get());
  const at::Tensor all = at::cat(results);
  // A mask of dropout is that of its backward.
  dist_autograd::backward(context, {all.square().sum()});
  return at::cat({all.detach(), dist_autograd::get_gradients(context).at(0).second});
}

TEST(DistAutogradRandomTest, HandlersDrawTheSameInEachRunAndOnAnyNumberOfWorkers) {
  const ContextOptions key{.random = core::RandomKey{.seed = 7, .step = 3}};
  at::Tensor on_three, again, of_next_step;
  {
    Job job(3);
    at::manual_seed(1);
    on_three = drawn(job, 3, key);
    const at::Tensor next = at::rand({3});
    at::manual_seed(1);
    EXPECT_TRUE(at::equal(next, at::rand({3}))) << "the process's own generator is not drawn from";
    again = drawn(job, 3, key);
    of_next_step = drawn(job, 3, {.random = core::RandomKey{.seed = 7, .step = 4}});
    job.shutdown();
  }
  Job job(1);
  const at::Tensor on_one = drawn(job, 1, key);
  EXPECT_TRUE(at::equal(on_three, again));
  EXPECT_TRUE(at::equal(on_three, on_one));
  EXPECT_FALSE(at::equal(on_three, of_next_step));
  // Each call draws something else.
  const std::vector<at::Tensor> calls = on_three.slice(0, 0, -64).split(64);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(calls[i], calls[j])) << i << ' ' << j;
  }
  job.shutdown();
}

TEST(DistAutogradRandomTest, WithoutAKeyHandlersDrawFromTheProcess) {
  Job job(2);
  const at::Tensor x = sixty_four_ones();
  at::manual_seed(5);
  const at::Tensor expected = drop_half(x);
  at::manual_seed(5);
  Context context(job[0]);
  EXPECT_TRUE(at::equal(job[0].rpc_sync<drop_half>("w1", x), expected));
  {
    Context with_key(job[0], {.random = core::RandomKey{.seed = 5}});
    at::manual_seed(5);
    EXPECT_FALSE(at::equal(job[0].rpc_sync<drop_half>("w1", x), expected));
    Context without(job[0]);  // the newest counts
    EXPECT_TRUE(at::equal(job[0].rpc_sync<drop_half>("w1", x), expected));
  }
  job.shutdown();
}

// Its calls are as many as there are owners.
TEST(DistAutogradRandomTest, AStepOfAnOptimizerChangesNothingOfWhatIsDrawnLater) {
  dropped_parameter = at::ones({2}).requires_grad_();
  Job job(2);
  const auto draw = [&](bool steps) {
    DistributedOptimizer optimizer({job[0].rpc_sync<dropped_parameter_reference>("w1")}, {.name = "sgd"});
    Context context(job[0], {.random = core::RandomKey{.seed = 1}});
    if (steps) optimizer.step(context);
    return job[0].rpc_sync<drop_half>("w1", sixty_four_ones());
  };
  EXPECT_TRUE(at::equal(draw(true), draw(false)));
  dropped_parameter.reset();
  job.shutdown();
}

TEST(DistAutogradRandomTest, WaitingForAnObjectChangesNothingOfWhatIsDrawnLater) {
  Job job(2);
  const auto draw = [&](bool waits) {
    Context context(job[0], {.random = core::RandomKey{.seed = 1}});
    const RRef<at::Tensor> object = job[0].remote<drop_half>("w1", sixty_four_ones());
    if (waits) object.when_made().get();
    return at::cat({object.to_here(), job[0].rpc_sync<drop_half>("w1", sixty_four_ones())});
  };
  EXPECT_TRUE(at::equal(draw(true), draw(false)));
  job.shutdown();
}

// They run on this thread or on another one, by chance.
TEST(DistAutogradRandomTest, CallsThatFollowFromAResultChangeNothingOfWhatIsDrawnLater) {
  Job job(2);
  Promise<int> number;
  number.set_value(1);
  const auto draw = [&](bool calls_more) {
    Context context(job[0], {.random = core::RandomKey{.seed = 1}});
    if (calls_more) {
      const at::Tensor more =
          number.future()
              .then([&](Future<int>) { return job[0].rpc_async<drop_half>("w1", sixty_four_ones()); })
              .get();
      EXPECT_FALSE(more.requires_grad()) << "the context has not recorded the call";
    }
    return job[0].rpc_sync<drop_half>("w1", sixty_four_ones());
  };
  EXPECT_TRUE(at::equal(draw(true), draw(false)));
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
