// Model runners on several placements of a process: they compute what one device does with the whole batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "cohort/base/error.h"
#include "cohort/data/synthetic.h"
#include "cohort/models/registry.h"
#include "cohort/optim/factory.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/model_runners.h"
#include "cohort/train/trainer.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/small_vgg.h"

namespace cohort::train {
namespace {

using Place = std::map<std::string, std::string>;
using Parameters = std::vector<at::Tensor>;

const Place kHalves = {{"features", "cpu:0/a"}, {"classifier", "cpu:0/b"}};

struct Way {
  std::string model = "data_parallel";
  const char* head = "linear";  // "default" has dropout
  Place place = {};             // none: three replicas, or cut in three by measuring
  std::string schedule = "1f1b";
  ClassificationOptions options = {};
  std::int64_t stop_after = 0;
  std::filesystem::path folder = {};
  comm::Group group = {};
};

config::DistributedConfig config_of(const Way& way) {
  return {.model = way.model,
          .devices = "cpu:0/a, cpu:0/b, cpu:0/c",
          .device_map = way.place,
          .schedule = way.schedule,
          .micro_batches = 3};
}

MeasuredStep measured_step() {
  return {.input = {.name = "input", .shape = {1, 16, 16}, .channels_last = true},
          .plan = {.part = 8},
          .optim = {}};
}

parallel::ModelRunner runner_of(const config::DistributedConfig& config, const torch::nn::AnyModule& model) {
  return make_model_runner(config, model, at::kCPU, measured_step());
}

Parameters train(const Way& way) {
  static std::mutex mutex;  // the generator that initial values come from is the process's
  std::unique_lock lock(mutex);
  torch::nn::AnyModule model = test::small_vgg("vgg11", way.head);
  ClassificationTask task(model, runner_of(config_of(way), model),
                          optim::make_optimizer({.name = "sgd", .lr = 0.01, .momentum = 0.9},
                                                {{.params = model.ptr()->parameters()}}),
                          optim::cosine(12), way.options);
  lock.unlock();
  // 8 samples are parts of 3, 3 and 2; the last batch of an epoch has 4.
  data::LoaderOptions loading{.shuffle = true, .seed = 2};
  loading.global_batch_size = 8;
  if (way.group) loading.rank = way.group.rank(), loading.world_size = way.group.size();
  data::Loader loader(std::make_shared<data::SyntheticDataset>(
                          data::SyntheticOptions{.size = 28, .shape = {1, 16, 16}, .num_classes = 4}),
                      loading);
  TrainerOptions options;
  const std::string among_ranks = !way.group ? "none" : way.model == "pipeline" ? "average" : "ddp";
  options.epochs(3)
      .seed(9)
      .max_steps(way.stop_after)
      .gradient_sync(parallel::make_gradient_sync(among_ranks, way.group));
  if (!way.folder.empty()) options.run_dir(way.folder).resume("auto");
  Trainer(options).fit(task, loader);
  return model.ptr()->parameters();
}

void expect_close(const Parameters& expected, const Parameters& got, double tolerance) {
  ASSERT_EQ(expected.size(), got.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::allclose(expected[i], got[i], tolerance, tolerance))
        << i << ": " << (expected[i] - got[i]).abs().max().item<double>();
  }
}

void expect_equal(const Parameters& expected, const Parameters& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], got[i])) << i;
}

std::vector<Way> all_ways(const char* head) {
  return {{.model = "data_parallel", .head = head},
          {.model = "model_parallel", .head = head},
          {.model = "model_parallel", .head = head, .place = kHalves},
          {.model = "pipeline", .head = head},
          {.model = "pipeline", .head = head, .schedule = "zb_h1"},
          {.model = "pipeline", .head = head, .place = kHalves, .schedule = "fill_drain"}};
}

TEST(PlacementsTest, EqualOneDeviceWithEveryFeature) {
  const ClassificationOptions features[] = {
      ClassificationOptions(), ClassificationOptions().accumulate(3), ClassificationOptions().clip_norm(0.5),
      ClassificationOptions().label_smoothing(0.1), ClassificationOptions().bf16(true)};
  for (const ClassificationOptions& feature : features) {
    const Parameters single = train({.model = "plain", .options = feature});
    for (Way way : all_ways("linear")) {
      SCOPED_TRACE(way.model + " " + way.schedule);
      way.options = feature;
      const Parameters got = train(way);
      if (way.model == "model_parallel") {
        expect_equal(single, got);  // the same operators on the same batch
      } else {
        expect_close(single, got, feature.bf16() ? 5e-3 : 1e-5);
      }
    }
  }
}

TEST(PlacementsTest, AnyCutAndScheduleDrawsTheSameNumbers) {
  const Parameters first = train({.model = "pipeline", .head = "default"});
  for (const char* schedule : {"fill_drain", "interleaved_1f1b", "zb_h1"}) {
    SCOPED_TRACE(schedule);
    expect_equal(first, train({.model = "pipeline", .head = "default", .schedule = schedule}));
  }
  expect_equal(first, train({.model = "pipeline", .head = "default", .place = kHalves}));
  expect_equal(train({.model = "model_parallel", .head = "default"}),
               train({.model = "model_parallel", .head = "default", .place = kHalves}));
}

TEST(PlacementsTest, ResumesBitForBitWithDropout) {
  for (Way way : all_ways("default")) {
    SCOPED_TRACE(way.model + " " + way.schedule);
    const Parameters straight = train(way);
    test::TempDir folder;
    way.folder = folder.path();
    way.stop_after = 6;
    train(way);
    way.stop_after = 0;
    expect_equal(straight, train(way));
  }
}

TEST(PlacementsTest, ResumesUnderAnyOtherRunner) {
  const Parameters straight = train({.model = "plain"});
  std::vector<Way> ways = all_ways("linear");
  ways.push_back({.model = "plain"});
  for (std::size_t i = 0; i < ways.size(); ++i) {
    Way before = ways[i], after = ways[(i + 1) % ways.size()];
    SCOPED_TRACE(before.model + ", then " + after.model);
    test::TempDir folder;
    before.folder = after.folder = folder.path();
    before.stop_after = 6;
    train(before);
    expect_close(straight, train(after), 1e-5);
  }
}

TEST(PlacementsTest, RanksOfTwoPlacementsEqualOneProcess) {
  const Parameters single = train({.model = "plain"});
  for (const char* model : {"data_parallel", "model_parallel", "pipeline"}) {
    SCOPED_TRACE(model);
    std::vector<Parameters> got(2);
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      const std::string prefix = base::concat("cpu:0/rank", group.rank());
      Way way{.model = model, .group = group};
      way.place = {{"features", prefix + "a"}, {"classifier", prefix + "b"}};
      got[static_cast<std::size_t>(group.rank())] = train(way);
    });
    expect_close(single, got[0], 1e-5);
    expect_equal(got[0], got[1]);
  }
}

TEST(PlacementsTest, EvaluationDrawsNothingAndHasTheModelsOwnValues) {
  torch::nn::AnyModule model = test::small_vgg("vgg11", "default");
  model.ptr()->eval();
  const at::Tensor images = at::rand({5, 1, 16, 16});
  const at::NoGradGuard no_grad;
  const at::Tensor expected = model.forward(images);
  for (const Way& way : all_ways("default")) {
    SCOPED_TRACE(way.model);
    const parallel::ModelRunner call = runner_of(config_of(way), model);
    at::manual_seed(5);
    EXPECT_TRUE(at::allclose(expected, call.forward(images), 1e-5, 1e-6));
    const at::Tensor next = at::rand({3});
    at::manual_seed(5);
    EXPECT_TRUE(at::equal(next, at::rand({3})));
  }
}

TEST(PlacementsTest, RejectWhatIsNotThere) {
  const torch::nn::AnyModule model = test::small_vgg("vgg11");
  const auto call = [&](const char* runner, const Place& place, const char* placements = "") {
    config::DistributedConfig config = config_of({.model = runner, .place = place});
    config.devices = placements;
    return runner_of(config, model);
  };
  COHORT_EXPECT_THROW_WITH(call("data_parallel", {}, "cpu:4000"), ConfigError, "core 4000 is asked for");
  COHORT_EXPECT_THROW_WITH(call("pipeline", {}, "cpu:4000"), ConfigError, "core 4000 is asked for");
  COHORT_EXPECT_THROW_WITH(call("model_parallel", {{"features", "cpu:0"}}), ConfigError,
                           "says nothing of the layer classifier.0");
  COHORT_EXPECT_THROW_WITH(
      call("pipeline", {{"features", "cpu:0/a"}, {"clasifier", "cpu:0/b"}, {"classifier", "cpu:0/b"}}),
      ConfigError, "no layer \"clasifier\"");
  COHORT_EXPECT_THROW_WITH(call("pipeline", {{"featurs", "cpu:0/a"}, {"classifier", "cpu:0/b"}}), ConfigError,
                           "no layer \"featurs\"");
  COHORT_EXPECT_THROW_WITH(call("pipeline", {{"features", "cpu:0/a"},
                                             {"features.3", "cpu:0/b"},
                                             {"features.6", "cpu:0/b2"},
                                             {"classifier", "cpu:0/b"}}),
                           ConfigError, "as stages take turns on placements");
  config::DistributedConfig one_sample = config_of({.model = "pipeline"});
  one_sample.micro_batches = measured_step().plan.part;
  COHORT_EXPECT_THROW_WITH(runner_of(one_sample, test::small_vgg("vgg11_bn")), UsageError,
                           "fewer distributed.micro_batches");
  one_sample.micro_batches = 0;
  COHORT_EXPECT_THROW_WITH(runner_of(one_sample, model), UsageError, "num_micro_batches: got 0");
  models::ModelOptions options;
  options.name = "lenet5";
  options.num_classes = 4;
  options.in_channels = 1;
  options.image_size = 28;
  COHORT_EXPECT_THROW_WITH(runner_of(config_of({.model = "pipeline"}), models::make_model(options)),
                           UsageError, "LeNet5 is not known as a list of layers");
}

}  // namespace
}  // namespace cohort::train
