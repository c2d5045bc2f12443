// How the configuration's keys reach model, optimizer and schedule.
#include "cohort/train/internal/factories.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/config/keys.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule_factory.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/train/example_step.h"
#include "cohort/train/script_bench.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

TEST(BuildTest, TheDefaultLearningRateOfAdamIsThatOfTheOptimizers) {
  EXPECT_EQ(config::default_lr("adam"), optim::AdamOptions().lr());
  EXPECT_EQ(config::default_lr("adamw"), optim::AdamWOptions().lr());
}

TEST(BuildTest, AScheduleThatDoesNotExistIsRejectedWithTheNearestName) {
  for (const std::string& name : optim::schedule_names()) {
    EXPECT_NE(make_schedule({.name = name}, {}, 0.1, 10), nullptr) << name;
  }
  for (const char* name : {"cosin", "steps", ""}) {
    COHORT_EXPECT_THROW_WITH(make_schedule({.name = name}, {}, 0.1, 10), UsageError,
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
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.distributed.schedule = "2f1b"; }), UsageError,
                           "there is no pipeline schedule '2f1b'. Try: 1f1b; ");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.distributed.comm_hook = "bf17"; }), UsageError,
                           "there is no communication hook 'bf17'");
  COHORT_EXPECT_THROW_WITH(check([](auto& c) { c.run.checkpoint_format = "pt"; }), UsageError,
                           "there is no tensor format 'pt'");
}

TEST(BuildTest, AMisspeltScheduleOrHookIsRejectedByEachCommandEvenIfItAsksForNone) {
  const test::SmallRun run;
  for (const auto& [key, message] : std::map<std::string, std::string>{
           {"distributed.schedule=2f1b", "there is no pipeline schedule '2f1b'"},
           {"distributed.comm_hook=bf17", "there is no communication hook 'bf17'"}}) {
    config::Config config = run.config({key});
    config.data.type = "image_folder";  // whose files are not there
    COHORT_EXPECT_THROW_WITH(run_training(config, "test"), UsageError, message);
    COHORT_EXPECT_THROW_WITH(run_evaluation(config, run.path() / "none"), UsageError, message);
    COHORT_EXPECT_THROW_WITH(run_evaluation(config, TrainedWeights()), UsageError, message);
    COHORT_EXPECT_THROW_WITH(bench_script(config), UsageError, message);
    const ExampleStepOptions options{.model = config.model,
                                     .data = config.data,
                                     .optim = config.optim,
                                     .distributed = config.distributed,
                                     .train = config.train,
                                     .seed = config.run.seed,
                                     .plan = BatchPlan()};
    COHORT_EXPECT_THROW_WITH(ExampleStep(options), UsageError, message);
  }
}

TEST(BuildTest, ALoaderReadsThePartOfItsRank) {
  const config::DataConfig config{
      .type = "synthetic", .image_size = 4, .shuffle = false, .workers = 0, .synthetic_train = 8};
  const auto dataset = make_dataset(config, Split::kTrain, {.num_classes = 0, .seed = 1});
  for (const int rank : {0, 1}) {
    const LoaderSetup setup{.plan = batch_plan({.batch_size = 2}, {}, config, 2),
                            .shares = {.first = rank, .count = 1, .of = 2}};
    const auto loader = make_loader(config, Split::kTrain, dataset, setup);
    const std::optional<data::Batch> first = loader->next();
    ASSERT_TRUE(first);
    EXPECT_EQ(std::vector(first->indices.begin(), first->indices.end()),
              (std::vector<std::int64_t>{rank, rank + 2}));
    EXPECT_EQ(loader->batches_per_epoch(), 2);
  }
}

TEST(BuildTest, AModelHasTheClassesOfItsDataUnlessItsKeySaysMore) {
  const auto make = [](std::int64_t key, std::int64_t of_data) {
    const config::ModelConfig config{.name = "mlp", .num_classes = key, .options = {{"hidden", "8"}}};
    torch::nn::AnyModule model = make_model(
        config,
        {.input = {.name = "input", .shape = {1, 4, 4}}, .num_classes = of_data, .channels_last = false});
    return model.forward(at::ones({2, 1, 4, 4}));
  };
  EXPECT_EQ(make(0, 3).size(1), 3);
  EXPECT_EQ(make(5, 3).size(1), 5);
  EXPECT_TRUE(at::equal(make(0, 3), make(3, 0)));  // the same seed
  COHORT_EXPECT_THROW_WITH(make(2, 3), ConfigError, "model.num_classes is 2 but the data has 3 classes");
  COHORT_EXPECT_THROW_WITH(make(0, 0), ConfigError, "the data does not say how many classes it has");
}

TEST(BuildTest, ARateIsScaledBySamplesOfAStepOverThoseThatItIsFor) {
  const config::TrainConfig train{.batch_size = 4, .accumulate = 2};
  EXPECT_EQ(scale_lr({.lr = 0.5}, train, 32).lr, 0.5);
  EXPECT_EQ(scale_lr({.lr = 0.5, .lr_scaling = "linear"}, train, 32).lr, 2.0);
  EXPECT_EQ(scale_lr({.lr = 0.5, .lr_scaling = "sqrt"}, train, 32).lr, 1.0);
  EXPECT_EQ(scale_lr({.lr = 0.5, .lr_scaling = "linear", .lr_base_size = 16}, train, 32).lr, 1.0);
  COHORT_EXPECT_THROW_WITH(scale_lr({.lr = 0.5, .lr_scaling = "cubic"}, train, 32), ConfigError,
                           "optim.lr_scaling: got 'cubic', expected one of none, linear, sqrt");
  for (const std::string& scaling : config::find_key("optim.lr_scaling")->choices) {
    EXPECT_EQ(scale_lr({.lr = 0.5, .lr_scaling = scaling}, train, 8).lr, 0.5) << scaling;
  }
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

TEST(BuildTest, AWordThatAKeyDoesNotHaveIsRejectedInAConfigurationThatAProgramMade) {
  const test::SmallRun run;
  const auto rejected = [&](const auto& change, const std::string& message) {
    config::Config config = run.config();
    change(config);
    COHORT_EXPECT_THROW_WITH(run_training(config, "test"), ConfigError, message);
    COHORT_EXPECT_THROW_WITH(run_evaluation(config, run.path() / "none"), ConfigError, message);
  };
  rejected([](config::Config& c) { c.data.color = "grey"; },
           "data.color: got 'grey', expected one of rgb, gray");
  rejected([](config::Config& c) { c.train.precision = "fp16"; }, "train.precision: got 'fp16'");
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
