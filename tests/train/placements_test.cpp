// The strategy data_parallel: what it computes is what one device does with the whole batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/core/error.h"
#include "cohort/data/synthetic.h"
#include "cohort/models/registry.h"
#include "cohort/optim/factory.h"
#include "cohort/train/build.h"
#include "cohort/train/classification.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/small_vgg.h"

namespace cohort::train {
namespace {

struct Way {
  const char* strategy = "data_parallel";
  const char* head = "linear";  // "default" has dropout
  ClassificationOptions options = {};
  std::int64_t stop_after = 0;
  std::filesystem::path folder = {};
};

std::vector<at::Tensor> train(const Way& way) {
  torch::nn::AnyModule model = test::small_vgg("vgg11", way.head);
  Config config;
  config.distributed.strategy = way.strategy;
  config.distributed.placements = "cpu:0/a, cpu:0/b, cpu:0/c";
  std::shared_ptr<optim::Optimizer> optimizer = optim::make_optimizer(
      {.name = "sgd", .lr = 0.01, .momentum = 0.9}, {{.params = model.ptr()->parameters()}});
  ClassificationTask task(model, make_forward(config, model, at::kCPU), optimizer, optim::cosine(12),
                          way.options);
  // 8 samples are parts of 3, 3 and 2; the last batch of an epoch has 4.
  data::Loader loader(std::make_shared<data::SyntheticDataset>(
                          data::SyntheticOptions{.size = 28, .shape = {1, 16, 16}, .num_classes = 4}),
                      {.batch_size = 8, .shuffle = true, .seed = 2});
  TrainerOptions options;
  options.epochs(3).seed(9).max_steps(way.stop_after).strategy(make_strategy(way.strategy));
  if (!way.folder.empty()) options.run_dir(way.folder).resume("auto");
  Trainer(options).fit(task, loader);
  return model.ptr()->parameters();
}

TEST(DataParallelStrategyTest, EqualsOneDeviceWithEveryFeature) {
  const ClassificationOptions ways[] = {
      ClassificationOptions(), ClassificationOptions().accumulate(3), ClassificationOptions().clip_norm(0.5),
      ClassificationOptions().label_smoothing(0.1), ClassificationOptions().bf16(true)};
  for (const ClassificationOptions& way : ways) {
    const auto single = train({.strategy = "single", .options = way});
    const auto parallel = train({.options = way});
    const double tolerance = way.bf16() ? 2e-3 : 1e-5;
    ASSERT_EQ(single.size(), parallel.size());
    for (std::size_t i = 0; i < single.size(); ++i) {
      EXPECT_TRUE(at::allclose(single[i], parallel[i], tolerance, tolerance))
          << i << ": " << (single[i] - parallel[i]).abs().max().item<double>();
    }
  }
}

TEST(DataParallelStrategyTest, ResumesBitForBitWithDropout) {
  const auto straight = train({.head = "default"});
  test::TempDir folder;
  train({.head = "default", .stop_after = 6, .folder = folder.path()});
  const auto resumed = train({.head = "default", .folder = folder.path()});
  ASSERT_EQ(straight.size(), resumed.size());
  for (std::size_t i = 0; i < straight.size(); ++i) EXPECT_TRUE(at::equal(straight[i], resumed[i])) << i;
}

TEST(DataParallelStrategyTest, RefusesWhatIsNotThere) {
  models::ModelOptions options;
  options.name = "lenet5";
  options.num_classes = 4;
  options.in_channels = 1;
  options.image_size = 28;
  torch::nn::AnyModule model = models::make_model(options);
  Config config;
  config.distributed.strategy = "data_parallel";
  config.distributed.placements = "cpu:4000";
  COHORT_EXPECT_THROW_WITH(make_forward(config, model, at::kCPU), ConfigError, "core 4000 is asked for");
  EXPECT_EQ(make_strategy("data_parallel")->name(), "data_parallel");
}

}  // namespace
}  // namespace cohort::train
