// Ten thousand steps on placements leave nothing behind: no memory, no thread.
#include <malloc.h>
#include <torch/nn/modules/linear.h>

#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/device_mapped.h"
#include "tests/pipeline/nets.h"

namespace cohort::pipeline {
namespace {

using test::mlp;

std::size_t bytes_in_use() {
  const auto all = mallinfo2();  // of every thread's arena
  return all.uordblks + all.hblkhd;
}

// What a step may leave is told from what the allocator keeps for threads: a tensor a step would be 2 MiB.
template <typename Step>
void expect_nothing_left(const Step& step) {
  for (int i = 0; i < 1000; ++i) step();
  const std::size_t bytes = bytes_in_use();
  const std::ptrdiff_t before = test::num_threads();
  for (int i = 0; i < 10000; ++i) step();
  EXPECT_LT(static_cast<double>(bytes_in_use()) - static_cast<double>(bytes), 256 * 1024);
  EXPECT_EQ(test::num_threads(), before);
}

void expect_pipeline_leaves_nothing(Schedule schedule) {
  auto model = mlp(4);
  Pipeline pipe(test::cut(model, {3}),
                {.placements = test::placements(2), .num_micro_batches = 2, .schedule = schedule});
  const at::Tensor x = at::ones({2, 10}), y = at::ones({2, 5});
  expect_nothing_left([&] {
    model->zero_grad();
    pipe.step(x, y, [](const at::Tensor& a, const at::Tensor& b) { return (a - b).square().mean(); });
  });
}

TEST(EnduranceTest, PipelineLeavesNothing) {
  expect_pipeline_leaves_nothing(Schedule::kOneFOneB);
}

TEST(EnduranceTest, PipelineThatSplitsBackwardsLeavesNothing) {
  expect_pipeline_leaves_nothing(Schedule::kZeroBubble);
}

TEST(EnduranceTest, DataParallelLeavesNothing) {
  torch::nn::Linear net(4, 2);
  parallel::DataParallel<torch::nn::Linear> model(net,
                                                  {.device_ids = base::parse_placements("cpu:0/a,cpu:1/a")});
  const at::Tensor x = at::ones({2, 4});
  expect_nothing_left([&] {
    net->zero_grad();
    model.forward(x).sum().backward();
  });
}

TEST(EnduranceTest, PlacedLeavesNothing) {
  parallel::DeviceMapped<torch::nn::Linear> first(torch::nn::Linear(4, 4), base::Placement::parse("cpu:0/a"));
  parallel::DeviceMapped<torch::nn::Linear> second(torch::nn::Linear(4, 2),
                                                   base::Placement::parse("cpu:1/a"));
  const at::Tensor x = at::ones({2, 4});
  expect_nothing_left([&] {
    first->zero_grad();
    second->zero_grad();
    second.forward(first.forward(x)).sum().backward();
  });
}

}  // namespace
}  // namespace cohort::pipeline
