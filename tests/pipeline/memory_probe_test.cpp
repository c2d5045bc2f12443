#include "cohort/pipeline/memory_probe.h"

#include "cohort/base/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

PipelineParts two_stages(const torch::nn::Sequential& model) {
  PipelineParts parts{.stages = cut(model, {4}), .options = {}};
  parts.options.placements = placements(2);
  parts.options.num_micro_batches = 4;
  parts.options.keep_outputs = true;
  return parts;
}

at::Tensor mean_square(const at::Tensor& logits, const at::Tensor& target) {
  return at::mse_loss(logits, target);
}

TEST(PipelineMemoryTest, AModelRunnerRunsThePipeline) {
  auto model = mlp();
  const at::Tensor input = torch::randn({8, 10}), target = torch::randn({8, 5});
  const PipelineParts parts = two_stages(model);
  const parallel::ModelRunner runner = run_pipeline(parts, at::kCPU);
  const auto step = runner.step(input, target, mean_square, 2);
  EXPECT_TRUE(at::allclose(step.loss, 2 * mean_square(model->forward(input), target)));
  EXPECT_TRUE(at::allclose(step.logits, model->forward(input)));
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : parts.stages[1].parameters())
    bytes += static_cast<std::int64_t>(parameter.nbytes());
  EXPECT_EQ(gradient_bytes(parts, 1), bytes);
}

TEST(PipelineMemoryTest, EachPlacementHoldsMoreOfMoreSamples) {
  auto model = mlp();
  const PipelineParts parts = two_stages(model);
  const auto step = [](const parallel::ModelRunner& runner, std::int64_t samples) {
    runner.step(at::zeros({samples, 10}), at::zeros({samples, 5}), mean_square, 1);
  };
  const std::vector<memory::StepMemory> memories = probe_memory(parts, step, 64, false);
  ASSERT_EQ(memories.size(), 3U);
  for (std::size_t i = 0; i < 2; ++i) {
    SCOPED_TRACE(i);
    EXPECT_GT(memories[i].activations(2000), memories[i].activations(1000) * 3 / 2);
    EXPECT_GE(memories[i].peak(2000), memories[i].activations(2000));
    EXPECT_EQ(gradient_bytes(parts, static_cast<int>(i)), 0);
  }
  // The calling thread makes the batch.
  EXPECT_GE(memories[2].peak(1000), 1000 * (10 + 5) * 4);
}

TEST(PipelineMemoryTest, MicroBatchesAreCutByTheirNumberOrByTheirSize) {
  auto model = mlp();
  PipelineParts parts = two_stages(model);
  const auto step = [](const parallel::ModelRunner& runner, std::int64_t samples) {
    runner.step(at::zeros({samples, 10}), at::zeros({samples, 5}), mean_square, 1);
  };
  const auto by_number = probe_memory(parts, step, 64, false);
  parts.options.num_micro_batches = 0;
  COHORT_EXPECT_THROW_WITH(probe_memory(parts, step, 64, false), UsageError,
                           "got num_micro_batches = 0 and split_size = 0, expected one of them above 0");
  parts.options.split_size = 16;
  const auto by_size = probe_memory(parts, step, 64, false);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(double(by_size[i].activations(64)) / double(by_number[i].activations(64)), 1, 0.01) << i;
  }
}

}  // namespace
}  // namespace cohort::pipeline
