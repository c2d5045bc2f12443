// Training on several ranks, each a thread with a group of its own over Gloo.
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <mutex>

#include "cohort/base/error.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/models/registry.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/distributed_setup.h"
#include "cohort/train/internal/fit/group_coordinator.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

using test::TempDir;

// What a test trains: a net that maps [N, ...] to [N, 6], and data for it.
struct Case {
  std::function<torch::nn::AnyModule()> make;
  std::vector<std::int64_t> shape;
  at::ScalarType type = at::kFloat;
  double lr = 0.05;
  bool freeze_norms = false;
};

constexpr std::int64_t kRankSamples = 26;  // three steps of 9, 9 and 8: no share but the first's divides
constexpr std::int64_t kGlobalBatch = 9;

TEST(RankDeviceTest, ARankTakesItsOwnGpuOrTheOneThatItSees) {
  EXPECT_EQ(gpu_of_rank(3, 8), 3);
  EXPECT_EQ(gpu_of_rank(3, 1), 0) << "a launcher shows each rank its own";
  EXPECT_EQ(gpu_of_rank(3, 2), 1) << "ranks share";
  EXPECT_EQ(gpu_of_rank(0, 0), 0);
}

TEST(RankDeviceTest, AProcessThatIsAloneHasTheThreadsThatItIsGivenUnlessThoseOfThePlacementsHaveThem) {
  const auto alone = join_ranks({}, {}, "");
  EXPECT_EQ(alone->size(), 1);
  EXPECT_EQ(threads_of_rank(3, "plain", *alone), 3);
  EXPECT_EQ(threads_of_rank(0, "plain", *alone), 0);
  EXPECT_EQ(threads_of_rank(2, "pipeline", *alone), 2);
  EXPECT_EQ(threads_of_rank(0, "pipeline", *alone), 1);
  EXPECT_EQ(device_of_rank("auto"), "auto");
}

TEST(RankDeviceTest, AGradientSyncThatDoesNotSeeTheGradientsOfTheRunnerIsRejected) {
  COHORT_EXPECT_THROW_WITH(join_ranks({.model = "pipeline", .gradients = "ddp"}, {}, ""), ConfigError,
                           "distributed.gradients is ddp and distributed.model is pipeline: gradients of a "
                           "pipeline come on the threads of its stages. Try: distributed.gradients=average");
}

torch::nn::AnyModule mlp() {
  return models::make_model(
      {.name = "mlp", .num_classes = 6, .in_channels = 1, .image_size = 3, .extra = {{"hidden", "16"}}});
}

// A classifier in any type, whose norms stay in evaluation mode where asked: batch statistics are a rank's
// own.
struct NumbersTask : Task {
  NumbersTask(const Case& of) : of_(of) {
    // at::manual_seed is the process's, and the ranks are threads of one.
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    at::manual_seed(3);
    net = of.make();
    net.ptr()->to(of.type);
    if (of.freeze_norms) {  // else a bias is what one step makes of 0, and as inexact as a gradient
      const at::NoGradGuard no_grad;
      for (auto& entry : net.ptr()->named_parameters()) {
        if (entry.key().ends_with("bias")) entry.value().fill_(0.1);
      }
    }
    optimizer = std::make_shared<optim::SGD>(net.ptr()->parameters(), optim::SGDOptions(of.lr).momentum(0.9));
    add_module("", net.ptr());
    add_optimizer("", optimizer);
  }
  void set_training(bool training) override { Task::set_training(training && !of_.freeze_norms); }
  at::Tensor loss(data::Batch& batch) {
    return at::cross_entropy_loss(net.forward<at::Tensor>(batch.input()), batch.target());
  }
  StepMetrics train_step(data::Batch& batch) override {
    optimizer->zero_grad();
    at::Tensor value;
    if (batch.size > 0) {
      value = loss(batch);
      if (tells_before) prepare_average(*optimizer, static_cast<double>(batch.size), batch.size != poison);
      value.backward();
    }
    if (!average_gradients(*optimizer, static_cast<double>(batch.size), batch.size != poison)) {
      return {{"loss", std::numeric_limits<double>::quiet_NaN(), 1}};
    }
    optimizer->step();
    if (batch.size == 0) return {};
    return {{"loss", value.detach(), static_cast<double>(batch.size)}};
  }
  StepMetrics eval_step(data::Batch& batch) override {
    samples_evaluated += batch.size;
    return {{"loss", loss(batch), static_cast<double>(batch.size)}};
  }

  const Case of_;
  torch::nn::AnyModule net;
  std::shared_ptr<optim::Optimizer> optimizer;
  std::int64_t samples_evaluated = 0;
  std::int64_t poison = -1;  // a batch of this size has a loss that is not finite
  bool tells_before = true;  // that it will average
};

std::shared_ptr<data::Dataset> data_of(const Case& of, std::int64_t samples = kRankSamples) {
  std::vector<std::int64_t> shape = {samples};
  shape.insert(shape.end(), of.shape.begin(), of.shape.end());
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  const at::Tensor input = at::arange(numel, at::kDouble).mul(0.7).sin().view(shape).to(of.type);
  return std::make_shared<data::TensorDataset>(
      std::vector<at::Tensor>{input, input.flatten(1).narrow(1, 0, 6).argmax(1)});
}

data::LoaderOptions share(const parallel::GradientSync& gradient_sync) {
  data::LoaderOptions options{.global_batch_size = kGlobalBatch, .shuffle = true, .seed = 5};
  options.rank = gradient_sync.rank();
  options.world_size = gradient_sync.size();
  options.last_batch = data::LastBatchPolicy::kKeep;
  return options;
}

struct Outcome {
  std::map<std::string, at::Tensor> parameters;
  FitResult fit;
};

Outcome outcome_of(const NumbersTask& task, FitResult fit) {
  Outcome outcome{.parameters = {}, .fit = std::move(fit)};
  for (const auto& entry : task.net.ptr()->named_parameters())
    outcome.parameters[entry.key()] = entry.value().detach().clone();
  return outcome;
}

// That of the test that runs.
std::string sync_name;

class RanksTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { sync_name = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(GradientSyncs, RanksTest, testing::Values("average", "ddp"),
                         [](const auto& param) { return std::string(param.param); });

using Change = std::function<void(TrainerOptions&)>;

Outcome train(const Case& of, const std::shared_ptr<parallel::GradientSync>& gradient_sync,
              const Change& change, const data::Dataset* = nullptr) {
  NumbersTask task(of);
  data::Loader loader(data_of(of), share(*gradient_sync));
  data::Loader eval(data_of(of, 7), share(*gradient_sync));
  TrainerOptions options =
      TrainerOptions().epochs(1000).seed(11).save_every(0).eval_every(0).gradient_sync(gradient_sync);
  change(options);
  return outcome_of(task, Trainer(options).fit(task, loader, options.eval_every() > 0 ? &eval : nullptr));
}

// Trains on `ranks` ranks (0: without a group) and returns what each of them ended with.
std::vector<Outcome> train_on(int ranks, const Case& of, const Change& change) {
  if (ranks == 0) return {train(of, std::make_shared<parallel::GradientSync>(), change)};
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  test::run_ranks(
      ranks, "gloo",
      [&](comm::Group& group) {
        outcomes[static_cast<std::size_t>(group.rank())] =
            train(of, parallel::make_gradient_sync(sync_name, group), change);
      },
      std::chrono::seconds(60));
  return outcomes;
}

double largest_difference(const Outcome& a, const Outcome& b) {
  double largest = 0;
  for (const auto& [name, value] : a.parameters) {
    const double norm = value.to(at::kDouble).norm().item<double>();
    const double difference = (value - b.parameters.at(name)).to(at::kDouble).norm().item<double>();
    largest = std::max(largest, norm > 0 ? difference / norm : difference);
  }
  return largest;
}

bool same_bits(const Outcome& a, const Outcome& b) {
  for (const auto& [name, value] : a.parameters) {
    if (!at::equal(value, b.parameters.at(name))) return false;
  }
  return true;
}

Change steps(std::int64_t count) {
  return [count](TrainerOptions& options) { options.max_steps(count).log_every(0); };
}

// The proof of docs/guide/parallel.md: N ranks against one process on the joined batch.
void expect_ranks_equal_one_process(const Case& of, double after_one, double after_fifty) {
  const auto loss_after = [&](std::int64_t count) {
    return train_on(0, of, steps(count))[0].fit.metrics.at("train_loss");
  };
  EXPECT_LT(loss_after(51), loss_after(3)) << "the loss does not fall";
  for (const auto& [count, tolerance] : {std::pair(1, after_one), std::pair(50, after_fifty)}) {
    const Outcome single = train_on(0, of, steps(count))[0];
    ASSERT_EQ(single.fit.steps, count);
    for (const int ranks : {2, 4}) {
      const std::vector<Outcome> all = train_on(ranks, of, steps(count));
      EXPECT_LE(largest_difference(single, all[0]), tolerance) << ranks << " ranks, " << count << " steps";
      for (const Outcome& other : all) EXPECT_TRUE(same_bits(all[0], other)) << ranks << " ranks";
    }
  }
}

TEST_P(RanksTest, InDoubleRanksEqualOneProcessTo1e10) {
  expect_ranks_equal_one_process({.make = mlp, .shape = {1, 3, 3}, .type = at::kDouble}, 1e-10, 1e-10);
}

TEST_P(RanksTest, InFloatRanksEqualOneProcessToRounding) {
  expect_ranks_equal_one_process({.make = mlp, .shape = {1, 3, 3}}, 1e-6, 1e-4);
}

TEST_P(RanksTest, Vgg11RanksEqualOneProcess) {
  const auto make = [] {
    models::ModelOptions options{.name = "vgg11", .num_classes = 6, .extra = {}};
    options.image_size = 32;
    options.width = 0.125;
    options.head = "linear";
    return models::make_model(options);
  };
  const Case in_double{.make = make, .shape = {3, 32, 32}, .type = at::kDouble, .lr = 0.02};
  expect_ranks_equal_one_process(in_double, 1e-10, 1e-10);
  // A bias begins at zero, so after one step it is a gradient: 1.02e-6 by the kernels of a CPU without
  // AVX-512.
  expect_ranks_equal_one_process({.make = make, .shape = {3, 32, 32}, .lr = 0.02}, 2e-6, 1e-4);
}

TEST_P(RanksTest, Resnet18WithFrozenNormsRanksEqualOneProcess) {
  const auto make = [] {
    return models::make_model({.name = "resnet18", .num_classes = 6, .width = 0.25, .extra = {}});
  };
  expect_ranks_equal_one_process({.make = make, .shape = {3, 16, 16}, .lr = 0.001, .freeze_norms = true},
                                 1e-6, 1e-4);
}

TEST_P(RanksTest, TwoRunsEndWithTheSameBits) {
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  EXPECT_TRUE(same_bits(train_on(3, of, steps(20))[0], train_on(3, of, steps(20))[0]));
}

TEST_P(RanksTest, EvaluationCoversEachSampleOnceAndAllRanksHearTheSame) {
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  const Change evaluate = [](TrainerOptions& o) { o.epochs(2).eval_every(1).best_metric("val_loss"); };
  const Outcome single = train_on(0, of, evaluate)[0];
  const std::vector<Outcome> ranks = train_on(4, of, evaluate);
  for (const Outcome& rank : ranks) {
    EXPECT_EQ(rank.fit.metrics, ranks[0].fit.metrics);
    for (const char* name : {"train_loss", "val_loss"}) {
      EXPECT_NEAR(rank.fit.metrics.at(name), single.fit.metrics.at(name), 1e-6) << name;
    }
  }
  std::atomic<std::int64_t> samples{0};
  test::run_ranks(4, "gloo", [&](comm::Group& group) {
    const auto gradient_sync = parallel::make_gradient_sync("auto", group);
    NumbersTask task(of);
    data::Loader eval(data_of(of, 7), share(*gradient_sync));
    Trainer(TrainerOptions().gradient_sync(gradient_sync)).evaluate(task, eval);
    samples += task.samples_evaluated;
  });
  EXPECT_EQ(samples, 7);
}

TEST_P(RanksTest, ACheckpointOfTwoRanksContinuesBitwiseOnTwoAndToRoundingOnOneOrThree) {
  const Case of{.make = mlp, .shape = {1, 3, 3}, .type = at::kDouble};
  const auto until = [&](std::int64_t last, const TempDir& folder, const char* resume) {
    return Change([=, path = folder.path()](TrainerOptions& o) {
      o.max_steps(last).run_dir(path).resume(resume).save_every_steps(2).log_every(1);
    });
  };
  TempDir whole_folder;
  const std::vector<Outcome> whole = train_on(2, of, until(12, whole_folder, ""));
  for (const int ranks : {0, 2, 3}) {
    TempDir folder;
    train_on(2, of, until(8, folder, ""));  // in the middle of the third epoch
    const std::vector<Outcome> rest = train_on(ranks, of, until(12, folder, "last"));
    EXPECT_EQ(rest[0].fit.steps, 12);
    EXPECT_LE(largest_difference(whole[0], rest[0]), 1e-10) << ranks << " ranks";
    EXPECT_TRUE(ranks != 2 || same_bits(whole[0], rest[0]));
    EXPECT_NEAR(whole[0].fit.metrics.at("train_loss"), rest[0].fit.metrics.at("train_loss"), 1e-10);
    for (const Outcome& rank : rest) EXPECT_TRUE(same_bits(rest[0], rank));
  }
}

TEST_P(RanksTest, AccumulationClippingSmoothingAndAutocastContinueBitwiseAndEqualOneProcessToRounding) {
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  const std::vector<std::pair<ClassificationOptions, double>> options = {
      {ClassificationOptions().accumulate(2), 1e-5},
      {ClassificationOptions().clip_norm(0.1), 1e-5},
      {ClassificationOptions().label_smoothing(0.1), 1e-5},
      {ClassificationOptions().accumulate(2).clip_norm(0.1).bf16(true), 2e-2},
  };
  for (const auto& [option, tolerance] : options) {
    const auto run = [&, &option = option](int ranks, std::int64_t last, const TempDir& folder,
                                           const char* resume) {
      std::vector<Outcome> outcomes(static_cast<std::size_t>(std::max(1, ranks)));
      const auto body = [&](const std::shared_ptr<parallel::GradientSync>& gradient_sync) {
        NumbersTask parts(of);
        ClassificationTask task(parts.net, parts.optimizer, nullptr, option);
        data::Loader loader(data_of(of), share(*gradient_sync));
        const FitResult fit = Trainer(TrainerOptions()
                                          .epochs(1000)
                                          .max_steps(last)
                                          .eval_every(0)
                                          .save_every_steps(2)
                                          .run_dir(folder.path())
                                          .resume(resume)
                                          .gradient_sync(gradient_sync))
                                  .fit(task, loader);
        outcomes[static_cast<std::size_t>(gradient_sync->rank())] = outcome_of(parts, fit);
      };
      if (ranks == 0) {
        body(std::make_shared<parallel::GradientSync>());
      } else {
        test::run_ranks(ranks, "gloo",
                        [&](comm::Group& group) { body(parallel::make_gradient_sync(sync_name, group)); });
      }
      return outcomes;
    };
    TempDir one_folder, whole_folder, folder;
    const Outcome single = run(0, 8, one_folder, "")[0];
    const std::vector<Outcome> whole = run(2, 8, whole_folder, "");
    EXPECT_LE(largest_difference(single, whole[0]), tolerance);
    run(2, 4, folder, "");
    for (const Outcome& rank : run(2, 8, folder, "last")) EXPECT_TRUE(same_bits(whole[0], rank));
  }
}

TEST_P(RanksTest, ALossThatIsNotFiniteOnOneRankEndsAllAtThatStepAndNamesTheRank) {
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  std::vector<std::string> messages(2);
  std::vector<Outcome> outcomes(2);
  for (const bool continues : {false, true}) {
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      const auto rank = static_cast<std::size_t>(group.rank());
      const auto gradient_sync = parallel::make_gradient_sync(sync_name, group);
      NumbersTask task(of);
      if (rank == 1) task.poison = 4;  // its share of each step
      data::Loader loader(data_of(of), share(*gradient_sync));
      TrainerOptions options =
          TrainerOptions().epochs(1).gradient_sync(gradient_sync).stop_on_non_finite(!continues);
      const at::Tensor before = task.net.ptr()->parameters()[0].detach().clone();
      if (continues) {
        outcomes[rank] = outcome_of(task, Trainer(options).fit(task, loader));
        EXPECT_EQ(outcomes[rank].fit.steps, 3);
        EXPECT_TRUE(at::equal(before, task.net.ptr()->parameters()[0]));
        return;
      }
      try {
        Trainer(options).fit(task, loader);
      } catch (const NumericError& error) {
        messages[rank] = error.what();
      }
    });
  }
  EXPECT_NE(messages[0].find("the loss of step 1 (epoch 1) is not finite on rank 1"), std::string::npos)
      << messages[0];
  EXPECT_NE(messages[1].find("the loss of step 1 (epoch 1) is not finite"), std::string::npos) << messages[1];
}

/// Gradients of 1e6, which float16 has no number for.
struct LargeGradients : Task {
  LargeGradients() {
    const at::NoGradGuard no_grad;
    net->weight.fill_(1);
    add_module("", net.ptr());
    add_optimizer("", sgd);
  }
  StepMetrics train_step(data::Batch& batch) override {
    sgd->zero_grad();
    const at::Tensor loss = net->forward(batch.input()).mean() * 1e6;
    prepare_average(*sgd, static_cast<double>(batch.size));
    loss.backward();
    average_gradients(*sgd, static_cast<double>(batch.size));
    step_if_finite(*sgd);
    return {{"loss", loss.detach(), static_cast<double>(batch.size)}};
  }
  torch::nn::Linear net{1, 1};
  std::shared_ptr<optim::Optimizer> sgd =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(1e-6));
};

TEST(CommHookTest, AStepWhoseGradientsAreTooLargeForFloat16IsLeftOutOnAllRanks) {
  for (const bool compressed : {false, true}) {
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      const auto gradient_sync = parallel::make_gradient_sync(
          "ddp", group, {.hook = compressed ? parallel::fp16_compress_hook() : parallel::CommHook()});
      LargeGradients task;
      data::Loader loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{at::ones({9, 1})}),
                          share(*gradient_sync));
      Trainer(TrainerOptions().epochs(1).gradient_sync(gradient_sync).stop_on_non_finite(false))
          .fit(task, loader);
      EXPECT_EQ(task.net->weight.item<float>() == 1, compressed);
    });
  }
}

TEST_P(RanksTest, ATaskThatDoesNotAverageIsRejected) {
  struct Alone : NumbersTask {
    using NumbersTask::NumbersTask;
    StepMetrics train_step(data::Batch&) override { return {}; }
  };
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    const auto gradient_sync = parallel::make_gradient_sync(sync_name, group);
    Alone task(of);
    data::Loader loader(data_of(of), share(*gradient_sync));
    COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions().gradient_sync(gradient_sync)).fit(task, loader),
                             UsageError, "did not average gradients over the 2 ranks");
  });
}

TEST_P(RanksTest, RanksThatWereStartedDifferentlyAreToldInWhat) {
  const Case of{.make = mlp, .shape = {1, 3, 3}};
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    const auto gradient_sync = parallel::make_gradient_sync(sync_name, group);
    COHORT_EXPECT_THROW_WITH(
        train(of, gradient_sync, [&](TrainerOptions& o) { o.epochs(group.rank() == 0 ? 3 : 4); }), UsageError,
        "the run is not the same on all ranks: rank 0 has 'epochs 3', rank 1 has 'epochs 4'");
    NumbersTask task(of);
    data::Loader alone(data_of(of), {.batch_size = 4});
    COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions().gradient_sync(gradient_sync)).fit(task, alone),
                             UsageError,
                             base::concat("the share of rank 0/1, and this is rank ", group.rank(), "/2"));
  });
}

TEST(GradientSyncTest, WhatOneRankRequestsAllAreToldAtTheNextStep) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    GroupCoordinator ranks(&group);
    for (int step = 0; step < 6; ++step) {
      RankCoordinator::ControlRequests requests;
      if (step == 2 && group.rank() == 1) requests.stop_signal = 15;
      if (step == 3 && group.rank() == 2) requests.save_now = true;
      const RankCoordinator::ControlRequests agreed = ranks.agree_on(requests);
      EXPECT_EQ(agreed.stop_signal, step == 3 ? 15 : 0) << step;
      EXPECT_EQ(agreed.save_now, step == 4) << step;
      EXPECT_FALSE(agreed.save_due);
    }
  });
}

TEST(GradientSyncTest, SyncsThatDoNotFitTheRanksAreErrors) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    COHORT_EXPECT_THROW_WITH(parallel::make_gradient_sync("none", group), UsageError, "there are 2 ranks");
    COHORT_EXPECT_THROW_WITH(parallel::make_gradient_sync("ring", group), UsageError,
                             "there is no gradient sync 'ring'");
  });
  COHORT_EXPECT_THROW_WITH(parallel::make_gradient_sync("average"), UsageError, "needs a process group");
  COHORT_EXPECT_THROW_WITH(parallel::make_gradient_sync("ddp"), UsageError, "needs a process group");
  EXPECT_EQ(parallel::make_gradient_sync("auto")->name(), "none");
}

}  // namespace
}  // namespace cohort::train
