// How the configuration's keys reach model, optimizer and schedule.
#include "cohort/train/internal/factories.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/config/keys.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule_factory.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

TEST(BuildTest, TheDefaultLearningRateOfAdamIsThatOfTheOptimizers) {
  EXPECT_EQ(config::default_lr("adam"), optim::AdamOptions().lr());
  EXPECT_EQ(config::default_lr("adamw"), optim::AdamWOptions().lr());
}

TEST(BuildTest, AScheduleThatDoesNotExistIsRefusedWithTheNearestName) {
  for (const std::string& name : optim::schedule_names()) {
    config::Config config;
    config.schedule.name = name;
    EXPECT_NE(make_schedule(config, 10), nullptr) << name;
  }
  config::Config config;
  for (const char* name : {"cosin", "steps", ""}) {
    config.schedule.name = name;
    COHORT_EXPECT_THROW_WITH(make_schedule(config, 10), UsageError,
                             base::concat("there is no schedule '", name, "'. Try: "));
  }
}

TEST(BuildTest, NamesThatNoRegistryHasAreFoundBeforeAnythingIsRead) {
  const auto check = [](const auto& change) {
    config::Config config;
    change(config);
    check_names(config);
  };
  check([](config::Config&) {});
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.optim.name = "adamv"; }), UsageError,
                           "there is no optimizer 'adamv'. Try: adam; ");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.data.sampler = "randm"; }), UsageError,
                           "there is no sampler 'randm'. Try: random; ");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.distributed.gradients = "dpp"; }), UsageError,
                           "there is no gradient sync 'dpp'. Try: ddp; ");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.distributed.backend = "glo"; }), UsageError,
                           "there is no backend 'glo'. Try: gloo; ");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.run.checkpoint_format = "pt"; }), UsageError,
                           "there is no tensor format 'pt'");
}

TEST(BuildTest, CachesOfAllRanksOfAHostTakeHalfOfItsMemory) {
  constexpr std::int64_t kAvailable = std::int64_t{64} << 30;
  for (const int ranks : {1, 2, 8}) {
    const std::int64_t training = cache_bytes(Split::kTrain, kAvailable, ranks);
    const std::int64_t validation = cache_bytes(Split::kVal, kAvailable, ranks);
    EXPECT_EQ(ranks * (training + validation), kAvailable / 2);
    EXPECT_EQ(training, 3 * validation);
  }
}

TEST(BuildTest, AWordThatAKeyDoesNotHaveIsRefusedInAConfigurationThatAProgramMade) {
  const test::SmallRun run;
  const auto refused = [&](const auto& change, const std::string& message) {
    config::Config config = run.config();
    change(config);
    COHORT_EXPECT_THROW_WITH(run_training(config, "test"), ConfigError, message);
    COHORT_EXPECT_THROW_WITH(run_evaluation(config, run.path() / "none"), ConfigError, message);
  };
  refused([](config::Config& c) { c.data.color = "grey"; },
          "data.color: got 'grey', expected one of rgb, gray");
  refused([](config::Config& c) { c.train.precision = "fp16"; }, "train.precision: got 'fp16'");
  COHORT_EXPECT_THROW_WITH(
      [&] {
        config::Config config = run.config();
        config.schedule.name = "cosin";
        run_training(config, "test");
      }(),
      UsageError, "there is no schedule 'cosin'. Try: cosine");
}

}  // namespace
}  // namespace cohort::train
