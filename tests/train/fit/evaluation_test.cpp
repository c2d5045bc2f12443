// Evaluation before the first epoch, and which epoch is the best.
#include "cohort/train/internal/fit/evaluation.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/config/best_metric.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/internal/fit/group_coordinator.h"
#include "cohort/train/trainer.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::Logged;
using test::message_contains;
using test::SmallRun;
using test::TempDir;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

data::Loader loader_of(std::int64_t samples, std::int64_t batch, bool drop_last = false) {
  return {std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{at::ones({samples, 2})}),
          {.batch_size = batch, .drop_last = drop_last}};
}

/// A regression whose evaluation says what the test wants it to say, an entry per evaluation.
struct Scripted : Task {
  explicit Scripted(std::string name, std::vector<double> values = {1})
      : name(std::move(name)), values(std::move(values)) {
    add_module("", net.ptr());
    add_optimizer("", sgd);
  }
  StepMetrics train_step(data::Batch& batch) override {
    ++steps;
    sgd->zero_grad();
    const at::Tensor loss = net->forward(batch.input()).square().mean();
    loss.backward();
    sgd->step();
    return {{"loss", loss.detach(), static_cast<double>(batch.size)}};
  }
  StepMetrics eval_step(data::Batch&) override {
    ++evaluations;
    // The first one comes before training.
    const std::size_t at = evaluations < 2 ? 0 : (evaluations - 2) % values.size();
    return {{name, values.at(at), 1}};
  }
  torch::nn::Linear net{2, 1};
  std::shared_ptr<optim::Optimizer> sgd =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.01));
  std::string name;
  std::vector<double> values;
  std::size_t evaluations = 0;
  int steps = 0;
};

TrainerOptions epochs(std::int64_t count, const fs::path& folder = {}) {
  return TrainerOptions().epochs(count).keep(0).run_dir(folder);
}

FitResult fit(Scripted& task, const TrainerOptions& options) {
  data::Loader train = loader_of(4, 2), eval = loader_of(1, 1);
  return Trainer(options).fit(task, train, &eval);
}

TEST(EvaluationTest, AMetricThatIsNotThereIsSaidBeforeTheFirstStep) {
  TempDir folder;
  Scripted task("mae");
  COHORT_EXPECT_THROW_WITH(fit(task, epochs(3, folder / "run").best_metric("val_accuracy")), UsageError,
                           "there is no metric \"val_accuracy\"; evaluation reports val_mae");
  EXPECT_EQ(task.steps, 0);
  EXPECT_FALSE(fs::exists(folder / "run"));
  EXPECT_EQ(fit(task, epochs(2, folder / "run").best_metric("val_mae")).best_epoch, 1);
}

/// Two samples; the file of the second is broken.
class HalfBroken : public data::ExampleDataset {
 public:
  std::int64_t size() const override { return 2; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
    if (index == 1) throw DataError("test", "broken.png is cut short");
    return {at::ones({2})};
  }
};

TEST(EvaluationTest, ValidationDataThatCannotBeReadIsSaidBeforeTheFirstStep) {
  TempDir folder;
  Scripted task("mae");
  data::Loader train = loader_of(4, 2), eval(std::make_shared<HalfBroken>(), {.batch_size = 2});
  COHORT_EXPECT_THROW_WITH(Trainer(epochs(3, folder / "run")).fit(task, train, &eval), DataError,
                           "broken.png is cut short");
  EXPECT_EQ(task.steps, 0);
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST(EvaluationTest, AMetricOfTrainingMayBeNamed) {
  Scripted task("mae");
  EXPECT_GE(fit(task, epochs(3).best_metric("train_loss")).best_epoch, 1);
}

TEST(EvaluationTest, AMetricThatIsMissingLaterIsAWarningAndTheRunIsSaved) {
  TempDir folder;
  Scripted task("mae");
  const Logged log;
  const FitResult result = fit(task, epochs(2, folder.path()).best_metric("train_f1"));
  EXPECT_TRUE(result.finished);
  EXPECT_EQ(result.best_epoch, 0);
  EXPECT_TRUE(message_contains(log.text(),
                               "epoch 1 cannot be the best: there is no metric train_f1; there are "
                               "train_loss, val_mae"));
  EXPECT_TRUE(fs::exists(folder / "checkpoints" / "epoch_0002" / "state.json"));
}

TEST(EvaluationTest, WithoutANameAccuracyIsTakenThenLossThenNone) {
  for (const auto& [name, best] :
       std::map<std::string, std::int64_t>{{"accuracy", 2}, {"loss", 3}, {"x", 0}}) {
    Scripted task(name, {0.5, 0.7, 0.3});
    EXPECT_EQ(fit(task, epochs(3)).best_epoch, best) << name;
  }
}

TEST(EvaluationTest, WhatIsBetterFollowsFromTheNameOrMustBeSaid) {
  for (const auto& [name, best] : std::map<std::string, std::int64_t>{
           {"loss", 3}, {"rmse", 3}, {"box_error", 3}, {"accuracy", 2}, {"f1", 2}}) {
    Scripted task(name, {0.5, 0.7, 0.3});
    EXPECT_EQ(fit(task, epochs(3).best_metric("val_" + name)).best_epoch, best) << name;
  }
  COHORT_EXPECT_THROW_WITH(Trainer(epochs(3).best_metric("val_margin")), UsageError,
                           "the name \"val_margin\" does not say whether more of it is better. Try: "
                           "best_is_highest(true)");
  for (const bool highest : {true, false}) {
    Scripted task("margin", {0.5, 0.7, 0.3});
    EXPECT_EQ(fit(task, epochs(3).best_metric("val_margin").best_is_highest(highest)).best_epoch,
              highest ? 2 : 3);
  }
}

TEST(EvaluationTest, AnEmptyLoaderAndATaskThatCannotEvaluateAreRejectedBeforeTheFirstStep) {
  Scripted task("loss");
  data::Loader train = loader_of(4, 2), empty = loader_of(3, 8, true);
  COHORT_EXPECT_THROW_WITH(Trainer(epochs(2)).fit(task, train, &empty), UsageError,
                           "the evaluation loader has no batch");
  struct OnlyTrains : Scripted {
    OnlyTrains() : Scripted("loss") {}
    StepMetrics eval_step(data::Batch& batch) override { return Task::eval_step(batch); }
  } only_trains;
  EXPECT_THROW(fit(only_trains, epochs(2)), UsageError);
  EXPECT_EQ(task.steps + only_trains.steps, 0);
  EXPECT_TRUE(fit(only_trains, epochs(1).eval_every(0)).finished);
}

TEST(EvaluationTest, TheCheckBeforehandIsOneBatchAndCanBeLeftOut) {
  for (const std::int64_t batches : {0, 1, 3}) {
    Scripted task("loss");
    data::Loader train = loader_of(4, 2), eval = loader_of(8, 1);
    Trainer(epochs(1).check_eval_batches(batches)).fit(task, train, &eval);
    EXPECT_EQ(static_cast<std::int64_t>(task.evaluations), 8 + batches);
  }
}

TEST(EvaluationTest, NaNIsNeverTheBestAndNeverStandsInItsWay) {
  for (const char* name : {"loss", "accuracy"}) {
    Scripted task(name, {kNaN, 0.5, kNaN});
    const FitResult result = fit(task, epochs(3));
    EXPECT_EQ(result.best_epoch, 2) << name;
    EXPECT_EQ(result.best, 0.5) << name;
  }
  Scripted never("loss", {kNaN});
  EXPECT_EQ(fit(never, epochs(2)).best_epoch, 0);
  Scripted infinite("loss", {kInfinity, 3, -kInfinity});
  EXPECT_EQ(fit(infinite, epochs(3)).best, -kInfinity);
}

TEST(EvaluationTest, ACheckpointOfNumbersThatAreNotFiniteIsReadBack) {
  for (const double value : {kNaN, kInfinity, -kInfinity}) {
    TempDir folder;
    Scripted task("loss", {value}), again("loss", {1});
    fit(task, epochs(2, folder.path()));
    const FitResult result = fit(again, epochs(3, folder.path()).resume("auto"));
    EXPECT_TRUE(result.finished);
    EXPECT_EQ(result.best_epoch, value == -kInfinity ? 1 : 3) << value;
  }
}

TEST(EvaluationTest, MetersAndOptionsThatAreNotFiniteAreReadBackAndNullIsNaN) {
  Scripted task("loss"), same("loss");
  RunState state;
  state.meters = {{"a", {kNaN, 1}}, {"b", {kInfinity, 2}}, {"c", {-kInfinity, 3}}, {"d", {0.1, 4}}};
  state.best = kNaN;
  task.sgd->param_groups()[0].lr = kInfinity;
  checkpoint::CheckpointContent content = capture(task, state);
  content.state = nlohmann::json::parse(content.state.dump());
  RunState read = restore(same, content);
  EXPECT_TRUE(std::isnan(read.meters.at("a").weighted));
  EXPECT_EQ(read.meters.at("b").weighted, kInfinity);
  EXPECT_EQ(read.meters.at("c").weighted, -kInfinity);
  EXPECT_EQ(read.meters.at("d").weighted, 0.1);
  EXPECT_TRUE(std::isnan(read.best));
  EXPECT_EQ(same.sgd->param_groups()[0].lr, kInfinity);

  content.state["run"]["best"] = nullptr;  // as older versions wrote it
  content.state["run"]["meters"]["a"] = {nullptr, 1};
  content.state["run"].erase("best_metric");
  content.state["run"].erase("best_is_highest");
  read = restore(same, content);
  EXPECT_TRUE(std::isnan(read.best) && std::isnan(read.meters.at("a").weighted));
}

TEST(EvaluationTest, WithAnotherMetricTheBestIsChosenAnew) {
  TempDir folder;
  Scripted task("accuracy", {0.9}), other("loss", {7, 6, 8});
  fit(task, epochs(2, folder.path()));
  const Logged log;
  const FitResult result = fit(other, epochs(5, folder.path()).resume("auto").best_metric("val_loss"));
  EXPECT_EQ(result.best, 6);
  EXPECT_EQ(result.best_epoch, 4);
  EXPECT_TRUE(
      message_contains(log.text(), "best was chosen by most val_accuracy and is now by least val_loss"));
}

TEST(EvaluationTest, TheBestOfAResumedRunIsComparedWithTheOneBefore) {
  TempDir folder;
  Scripted task("loss", {5, 6}), again("loss", {5.5, 4});
  fit(task, epochs(2, folder.path()));
  const FitResult result = fit(again, epochs(4, folder.path()).resume("auto"));
  EXPECT_EQ(result.best_epoch, 4);
}

TEST(EvaluationTest, WhatWasBetterIsRememberedWhereTheResumedProgramDoesNotSayIt) {
  for (const bool highest : {true, false}) {
    TempDir folder;
    Scripted task("margin", {5, 3}), again("margin", {4, 2, 6});
    fit(task, epochs(2, folder.path()).best_metric("val_margin").best_is_highest(highest));
    const FitResult result = fit(again, epochs(5, folder.path()).resume("auto"));
    EXPECT_EQ(result.best, highest ? 6 : 2);
  }
}

TEST(EvaluationTest, AnotherDirectionOfARememberedMetricChoosesAnew) {
  TempDir folder;
  Scripted task("margin", {5, 3}), again("margin", {4, 2});
  fit(task, epochs(2, folder.path()).best_metric("val_margin").best_is_highest(false));
  EXPECT_EQ(fit(again, epochs(4, folder.path()).resume("auto").best_is_highest(true)).best, 4);
}

TEST(EvaluationTest, AMetricThatSomeBatchesLackNamesTheWayOut) {
  struct Sometimes : Scripted {
    Sometimes() : Scripted("f1") {}
    StepMetrics eval_step(data::Batch&) override {
      if (++evaluations % 3 != 0) return {{"loss", 1, 1}};
      return {{"f1", 0.5, 1}};
    }
  };
  Sometimes rejected, whole;
  data::Loader train = loader_of(4, 2), eval = loader_of(3, 1);
  COHORT_EXPECT_THROW_WITH(Trainer(epochs(1).best_metric("val_f1")).fit(rejected, train, &eval), UsageError,
                           "check_eval_batches(0), where not every batch has it");
  EXPECT_EQ(Trainer(epochs(1).best_metric("val_f1").check_eval_batches(0)).fit(whole, train, &eval).best,
            0.5);
}

TEST(EvaluationTest, ABestOfOtherValidationDataIsNotCompared) {
  const auto ones = [](std::int64_t samples) { return loader_of(samples, 1); };
  TempDir folder;
  Scripted task("accuracy", {0.9, 0.8}), again("accuracy", {0.7, 0.6, 0.65}), kept("accuracy", {0.5, 0.6});
  data::Loader train = loader_of(4, 2), eval = ones(1);
  Trainer(epochs(2, folder.path())).fit(task, train, &eval);
  data::Loader same = ones(1);
  EXPECT_EQ(Trainer(epochs(4, folder.path()).resume("auto")).fit(kept, train, &same).best_epoch, 1);
  const Logged log;
  const FitResult anew =
      Trainer(epochs(7, folder.path()).resume("auto").keep_best(false)).fit(again, train, &same);
  EXPECT_EQ(anew.best_epoch, 5);
  EXPECT_TRUE(message_contains(log.text(), "best is chosen anew"));
}

TEST(EvaluationTest, ABestThatCannotBeLookedAtForAMomentIsStillTheBest) {
  TempDir folder;
  Scripted task("accuracy", {0.9, 0.8}), again("accuracy", {0.7});
  data::Loader train = loader_of(4, 2), eval = loader_of(1, 1), same = loader_of(1, 1);
  Trainer(epochs(2, folder.path())).fit(task, train, &eval);
  const std::filesystem::path best = folder / "checkpoints" / "epoch_0001";
  std::filesystem::rename(best, folder / "away");
  std::filesystem::create_symlink("epoch_0001", best);  // ELOOP
  EXPECT_EQ(Trainer(epochs(3, folder.path()).resume("last")).fit(again, train, &same).best_epoch, 1);
}

TEST(EvaluationTest, ALastBatchOfOneSampleIsSaidWhereTheModelHasBatchNorm) {
  const std::string reason = ", so that a forward gets a single one, and the model has batch norm";
  const auto log_of = [](const std::vector<std::string>& overrides) {
    const SmallRun run;
    const Logged log;
    run.start(overrides);
    return log.text();
  };
  const std::vector<std::string> norm = {
      "model.name=vgg11_bn", "model.options={}",   "model.width=0.05", "model.pools=2",
      "model.head=linear",   "data.image_size=16", "train.epochs=1",   "data.synthetic_train=21"};
  const auto with = [&](const std::string& more) {
    std::vector<std::string> all = norm;
    all.push_back(more);
    return all;
  };
  EXPECT_TRUE(message_contains(log_of(norm), "the last batch of each epoch has 1 sample" + reason));
  EXPECT_TRUE(message_contains(log_of(with("train.accumulate=2")),
                               "the last batch of each epoch has 5 samples in 2 parts" + reason));
  EXPECT_TRUE(message_contains(log_of(with("train.batch_size=1")), "each batch has 1 sample" + reason));
  for (const char* harmless : {"data.drop_last=true", "data.synthetic_train=20", "data.synthetic_train=22",
                               "model.name=vgg11", "train.max_steps=3"}) {
    EXPECT_EQ(log_of(with(harmless)).find(reason), std::string::npos) << harmless;
  }
}

TEST(EvaluateBatchesTest, WhatAVirtualRankDrawsFollowsFromTheBatchAndTheVirtualRank) {
  struct Drawing : Task {
    StepMetrics train_step(data::Batch&) override { return {}; }
    StepMetrics eval_step(data::Batch& batch) override {
      drawn[{batch.number, batch.share}] = at::rand({1}).item<double>();
      return {{"loss", 1.0, 1}};
    }
    std::map<std::pair<std::int64_t, std::int64_t>, double> drawn;
  };
  GroupCoordinator ranks(nullptr);
  data::Loader loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{at::ones({16, 2})}),
                      {.global_batch_size = 8, .world_size = 4, .num_shares = 4});
  Drawing all, some;
  evaluate_batches(all, loader, ranks, {.seed = 5});
  loader.set_shares(2, 2);
  evaluate_batches(some, loader, ranks, {.seed = 5});
  EXPECT_EQ(all.drawn.size(), 8U);
  EXPECT_EQ(some.drawn.size(), 4U);
  for (const auto& [place, value] : some.drawn) EXPECT_EQ(value, all.drawn.at(place));
  EXPECT_NE(all.drawn.at({0, 2}), all.drawn.at({0, 3}));
  EXPECT_NE(all.drawn.at({0, 2}), all.drawn.at({1, 2}));
}

TEST(BestMetricTest, NamesSayWhatIsBetter) {
  for (const char* name : {"val_loss", "loss", "val_bce_loss", "val_Loss", "val_RMSE", "top1_error",
                           "val/mae", "val_perplexity", "focalloss"}) {
    EXPECT_EQ(config::more_is_better(name), false) << name;
  }
  for (const char* name :
       {"val_accuracy", "val_acc", "val_top5", "val/F1", "train_iou", "balancedaccuracy", "f1_score"}) {
    EXPECT_EQ(config::more_is_better(name), true) << name;
  }
  for (const char* name :
       {"", "val_", "val_margin", "neg_mean_squared_error", "loss_ratio", "val_gloss_count", "val_score",
        "brier_score", "fid_score", "wer_score", "distance_score", "loss_accuracy", "val_fid_top1_score"}) {
    EXPECT_EQ(config::more_is_better(name), std::nullopt) << name;
  }
}

// What a later word counts (the accuracy of a loss?) is not guessed; an error of an accuracy is an error.
TEST(BestMetricTest, NamesThatSayBothSayNothing) {
  for (const char* less : {"loss", "error", "mae", "fid", "wer", "distance", "bce_loss", "perplexity"}) {
    for (const char* more : {"accuracy", "acc", "f1", "auc", "map", "reward"}) {
      const std::string name = std::string("val_") + less + "_" + more;
      EXPECT_EQ(config::more_is_better(name), std::nullopt) << name;
      EXPECT_EQ(config::more_is_better(name + "_score"), std::nullopt) << name;
      EXPECT_EQ(config::more_is_better(std::string(more) + "_" + less), false) << more << less;
    }
  }
}

}  // namespace
}  // namespace cohort::train
