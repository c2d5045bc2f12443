#include "cohort/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/classifier_job.h"

namespace cohort::train {
namespace {

using test::kBatch;
using test::make_data;
using test::make_loader;
using test::same_parameters;
using test::TempDir;
using test::three_epochs;

using Job = test::ClassifierJob;

class Recorder : public Callback {
 public:
  void on_fit_begin(const FitInfo& info) override { begin = info; }
  void on_step_end(const StepReport& report) override {
    steps.push_back(report.step);
    EXPECT_GT(report.seconds, 0);
  }
  void on_epoch_end(const EpochReport& report) override { epochs.push_back(report); }
  void on_save(std::int64_t step) override { saves.push_back(step); }

  FitInfo begin;
  std::vector<std::int64_t> steps;
  std::vector<EpochReport> epochs;
  std::vector<std::int64_t> saves;
};

TEST(TrainerTest, ALongerRunEqualsOneThatWasStoppedInTheMiddleOfAnEpochAndResumedWithOtherWorkers) {
  Job straight;
  data::Loader loader = make_loader();
  Trainer(three_epochs()).fit(*straight.task, loader);

  for (const std::int64_t stop_after : {1, 4, 5, 7, 13}) {
    TempDir folder;
    {
      Job first;
      data::Loader inline_loader = make_loader(0);
      Trainer(three_epochs().run_dir(folder.path()).save_every_steps(1).max_steps(stop_after))
          .fit(*first.task, inline_loader);
    }
    Job second;
    data::Loader threaded_loader = make_loader(2);
    const FitResult result =
        Trainer(three_epochs().run_dir(folder.path()).resume("last")).fit(*second.task, threaded_loader);
    EXPECT_EQ(result.steps, 15);
    EXPECT_TRUE(same_parameters(straight.net, second.net)) << "stopped after " << stop_after;
  }
}

TEST(TrainerTest, WithoutRestoredOptimizerStateTheResultWouldDiffer) {
  // Guards the test above: dropout and momentum do matter to the numbers.
  Job straight, other_seed;
  data::Loader loader = make_loader();
  Trainer(three_epochs()).fit(*straight.task, loader);
  Trainer(three_epochs().seed(12)).fit(*other_seed.task, loader);
  EXPECT_FALSE(same_parameters(straight.net, other_seed.net));
}

TEST(TrainerTest, AutoStartsAfreshWhenThereIsNothingAndLastRejects) {
  TempDir folder;
  Job job;
  data::Loader loader = make_loader();
  COHORT_EXPECT_THROW_WITH(
      Trainer(three_epochs().run_dir(folder.path()).resume("last")).fit(*job.task, loader), DataError,
      "no checkpoint \"last\"");
  EXPECT_EQ(Trainer(three_epochs().run_dir(folder.path()).resume("auto")).fit(*job.task, loader).steps, 15);
}

TEST(TrainerTest, ResumingWithAnotherSeedIsRejected) {
  TempDir folder;
  Job job;
  data::Loader loader = make_loader();
  Trainer(three_epochs().run_dir(folder.path()).max_steps(2)).fit(*job.task, loader);
  COHORT_EXPECT_THROW_WITH(
      Trainer(three_epochs().seed(12).run_dir(folder.path()).resume("last")).fit(*job.task, loader),
      UsageError, "was made with seed 11, asked for 12");
}

TEST(TrainerTest, ResumingWithAnotherBatchSizeIsRejected) {
  TempDir folder;
  Job job;
  data::Loader loader = make_loader();
  Trainer(three_epochs().run_dir(folder.path()).max_steps(2)).fit(*job.task, loader);
  data::Loader other(make_data(), {.batch_size = 4, .shuffle = true, .seed = 5});
  COHORT_EXPECT_THROW_WITH(
      Trainer(three_epochs().run_dir(folder.path()).resume("last")).fit(*job.task, other), UsageError,
      "was made with 8 samples a step, this run has 4");
}

struct StopInEvaluation : ClassificationTask {
  using ClassificationTask::ClassificationTask;
  StepMetrics eval_step(data::Batch& batch) override {
    if (++batches > 1) raise(SIGTERM);  // not in the one before the first epoch
    return ClassificationTask::eval_step(batch);
  }
  int batches = 0;
};

TEST(TrainerTest, AnEpochThatWasStoppedInItsEvaluationIsReportedAsIfItHadNotBeen) {
  data::Loader loader = make_loader();
  data::Loader eval = make_loader(0, false);
  const auto report_of = [&](Job& job, TrainerOptions options) {
    Trainer trainer(options);
    auto recorder = std::make_shared<Recorder>();
    trainer.add_callback(recorder);
    trainer.fit(*job.task, loader, &eval);
    return recorder->epochs.front();
  };
  TempDir folder;
  Job straight, first, second;
  const EpochReport expected = report_of(straight, three_epochs());
  StopInEvaluation task(first.net.ptr(), first.optimizer, optim::cosine(15));
  const FitResult stopped =
      Trainer(three_epochs().run_dir(folder.path()).handle_signals(true)).fit(task, loader, &eval);
  EXPECT_EQ(stopped.signal, SIGTERM);
  EXPECT_EQ(stopped.epochs, 0);
  const EpochReport report = report_of(second, three_epochs().run_dir(folder.path()).resume("auto"));
  EXPECT_EQ(report.epoch, expected.epoch);
  EXPECT_EQ(report.lr, expected.lr);
  EXPECT_EQ(report.metrics, expected.metrics);
  EXPECT_TRUE(same_parameters(straight.net, second.net));
}

TEST(TrainerTest, ALastEvaluationThatWasStoppedIsDoneOnResume) {
  data::Loader loader = make_loader();
  data::Loader eval = make_loader(0, false);
  for (const std::int64_t max_steps : {3, 5}) {
    TempDir folder;
    const auto options = three_epochs().run_dir(folder.path()).max_steps(max_steps).handle_signals(true);
    Job first;
    StopInEvaluation task(first.net.ptr(), first.optimizer, optim::cosine(15));
    EXPECT_EQ(Trainer(options).fit(task, loader, &eval).signal, SIGTERM);
    for (const std::size_t reports : {1, 0}) {  // once
      Job again;
      Trainer trainer(TrainerOptions(options).resume("auto"));
      const auto recorder = std::make_shared<Recorder>();
      trainer.add_callback(recorder);
      const FitResult result = trainer.fit(*again.task, loader, &eval);
      EXPECT_EQ(result.steps, max_steps);
      EXPECT_EQ(result.best_epoch, 1);
      ASSERT_EQ(recorder->epochs.size(), reports);
      if (reports == 1) {
        EXPECT_TRUE(recorder->epochs[0].evaluated);
      }
    }
  }
}

TEST(TrainerTest, AStepLimitAtTheEndOfAnEpochCompletesIt) {
  for (const bool drop_last : {false, true}) {
    SCOPED_TRACE(drop_last);
    // With drop_last some samples are left, which are no step.
    data::Loader loader(
        make_data(),
        {.batch_size = drop_last ? kBatch + 1 : kBatch, .shuffle = true, .drop_last = drop_last, .seed = 5});
    data::Loader eval = make_loader(0, false);
    const std::int64_t steps = loader.batches_per_epoch();
    ASSERT_EQ(loader.samples_per_epoch() % loader.options().batch_size != 0, drop_last);
    Job straight, first, second;
    Trainer(three_epochs()).fit(*straight.task, loader, &eval);
    TempDir folder;
    const auto in_folder = three_epochs().run_dir(folder.path());
    const auto fit = [&](Job& job, const TrainerOptions& options, Recorder& heard) {
      const auto recorder = std::make_shared<Recorder>();
      Trainer trainer(options);
      trainer.add_callback(recorder);
      const FitResult result = trainer.fit(*job.task, loader, &eval);
      heard = *recorder;
      return result;
    };
    Recorder heard;
    const FitResult limited = fit(first, TrainerOptions(in_folder).max_steps(2 * steps), heard);
    EXPECT_EQ(limited.epochs, 2);
    EXPECT_EQ(limited.steps, 2 * steps);
    EXPECT_EQ(limited.last_checkpoint.filename(), "epoch_0002");
    ASSERT_EQ(heard.epochs.size(), 2U);
    EXPECT_TRUE(heard.epochs[1].evaluated);
    const FitResult resumed = fit(second, TrainerOptions(in_folder).resume("last"), heard);
    EXPECT_EQ(resumed.epochs, 3);
    ASSERT_EQ(heard.epochs.size(), 1U) << "the second epoch was reported before";
    EXPECT_EQ(heard.epochs[0].epoch, 3);
    EXPECT_TRUE(same_parameters(straight.net, second.net));
  }
}

TEST(TrainerTest, EvaluatesAndSavesTheFirstTheLastAndEveryNthEpoch) {
  TempDir folder;
  Job job;
  data::Loader train = make_loader();
  data::Loader eval = make_loader(0, false);
  Trainer trainer(TrainerOptions().epochs(7).eval_every(3).save_every(3).run_dir(folder.path()));
  auto recorder = std::make_shared<Recorder>();
  trainer.add_callback(recorder);
  const FitResult result = trainer.fit(*job.task, train, &eval);
  std::vector<std::int64_t> evaluated;
  for (const EpochReport& report : recorder->epochs) {
    if (report.evaluated) evaluated.push_back(report.epoch);
    EXPECT_EQ(report.metrics.count("val_accuracy"), report.evaluated ? 1u : 0u);
  }
  EXPECT_EQ(evaluated, (std::vector<std::int64_t>{1, 3, 6, 7}));
  EXPECT_EQ(recorder->saves, (std::vector<std::int64_t>{5, 15, 30, 35}));
  EXPECT_TRUE(result.finished);
  EXPECT_GE(result.best_epoch, 1);
  EXPECT_TRUE(std::filesystem::exists(folder / "checkpoints" / "best" / "model.safetensors"));
  EXPECT_EQ(std::filesystem::read_symlink(folder / "checkpoints" / "last"), "epoch_0007");
}

TEST(TrainerTest, ACheckpointByStepsAtTheEndOfAnEpochIsThatOfTheWholeEpoch) {
  TempDir folder;
  Job job;
  data::Loader loader = make_loader();
  Trainer trainer(three_epochs().run_dir(folder.path()).save_every(0).save_every_steps(2).keep(0));
  auto recorder = std::make_shared<Recorder>();
  trainer.add_callback(recorder);
  trainer.fit(*job.task, loader);
  EXPECT_EQ(recorder->saves, (std::vector<std::int64_t>{2, 4, 6, 8, 10, 12, 14, 15}));
  EXPECT_TRUE(std::filesystem::exists(folder / "checkpoints" / "epoch_0002"));
  EXPECT_FALSE(std::filesystem::exists(folder / "checkpoints" / "step_00000010"));
}

TEST(TrainerTest, BestIsChosenByTheNamedMetricAndMode) {
  TempDir folder;
  Job job;
  data::Loader train = make_loader();
  data::Loader eval = make_loader(0, false);
  Trainer trainer(three_epochs().run_dir(folder.path()).best_metric("val_loss"));
  auto recorder = std::make_shared<Recorder>();
  trainer.add_callback(recorder);
  const FitResult result = trainer.fit(*job.task, train, &eval);
  double lowest = std::numeric_limits<double>::infinity();
  for (const EpochReport& report : recorder->epochs) lowest = std::min(lowest, report.metrics.at("val_loss"));
  EXPECT_EQ(result.best, lowest);
}

TEST(TrainerTest, TheSecondsOfAStepAreWithoutTheCallbacksOfTheStepBefore) {
  static constexpr std::chrono::milliseconds kTime{100};
  struct Slow : Callback {
    void on_step_end(const StepReport& report) override {
      fewest = std::min(fewest, report.step == 1 ? fewest : report.seconds);
      std::this_thread::sleep_for(kTime);
    }
    void on_epoch_end(const EpochReport& report) override { epoch_seconds = report.seconds; }
    double fewest = std::numeric_limits<double>::infinity(), epoch_seconds = 0;
  };
  Job job;
  data::Loader loader = make_loader();
  Trainer trainer(TrainerOptions().epochs(1));
  const auto slow = std::make_shared<Slow>();
  trainer.add_callback(slow);
  EXPECT_EQ(trainer.fit(*job.task, loader).steps, 5);
  const double callback_seconds = std::chrono::duration<double>(kTime).count();
  // The shortest of four: a busy machine may take long for a step, and hardly for each.
  EXPECT_LT(slow->fewest, callback_seconds);
  EXPECT_GE(slow->epoch_seconds, 4 * callback_seconds);
}

TEST(TrainerTest, TheSecondsOfTheFirstStepAreWithoutTheCallbacksInIt) {
  static constexpr std::chrono::milliseconds kTime{100};
  struct Slow : Callback {
    void on_first_batch(data::Batch&) override { std::this_thread::sleep_for(kTime); }
    void on_start_counts(const FitInfo&) override { std::this_thread::sleep_for(kTime); }
    void on_step_end(const StepReport& report) override { seconds = report.seconds; }
    double seconds = 0;
  };
  struct Nothing : Task {
    StepMetrics train_step(data::Batch&) override { return {}; }
  };
  Nothing task;
  data::Loader loader = make_loader();
  Trainer trainer(TrainerOptions().max_steps(1));
  const auto slow = std::make_shared<Slow>();
  trainer.add_callback(slow);
  EXPECT_EQ(trainer.fit(task, loader).steps, 1);
  EXPECT_GT(slow->seconds, 0);
  EXPECT_LT(slow->seconds, std::chrono::duration<double>(kTime).count());
}

TEST(TrainerTest, EpochMeansWeighAnUnevenLastBatchByWhatItHolds) {
  struct Count : Task {
    StepMetrics train_step(data::Batch& batch) override {
      return {{"loss", batch.input().mean(), static_cast<double>(batch.size)}};
    }
  } task;
  const at::Tensor values = at::arange(10, at::kFloat).view({10, 1});
  data::Loader loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{values}),
                      {.batch_size = 4});
  const FitResult result = Trainer(TrainerOptions()).fit(task, loader);
  EXPECT_NEAR(result.metrics.at("train_loss"), 4.5, 1e-12);
}

/// Input that turns the loss into NaN at step `bad_step`.
struct NotANumberAt : ClassificationTask {
  NotANumberAt(Job& job, std::int64_t bad_step)
      : ClassificationTask(job.net.ptr(), job.optimizer, nullptr), bad_step(bad_step) {}
  StepMetrics train_step(data::Batch& batch) override {
    if (++step == bad_step) batch.input().fill_(std::nan(""));
    return ClassificationTask::train_step(batch);
  }
  std::int64_t step = 0, bad_step;
};

TEST(TrainerTest, StopsAtALossThatIsNotFiniteNamingTheStep) {
  Job job;
  NotANumberAt task(job, 3);
  data::Loader loader = make_loader();
  COHORT_EXPECT_THROW_WITH(Trainer(three_epochs()).fit(task, loader), NumericError,
                           "the loss of step 3 (epoch 1) is not finite");
  for (const at::Tensor& parameter : job.net->parameters())
    EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
}

/// What the library says while `work` runs.
template <typename Work>
std::string logged(const Work& work) {
  struct Sink {
    Sink() {
      base::set_log_sink([this](base::LogLevel, std::string_view line) { text += std::string(line) + "\n"; });
    }
    ~Sink() { base::set_log_sink({}); }
    std::string text;
  } sink;
  work();
  return sink.text;
}

TEST(TrainerTest, CanContinueWithoutStepsWhoseLossIsNotFinite) {
  Job job;
  NotANumberAt task(job, 3);
  data::Loader loader = make_loader();
  FitResult result;
  const std::string log =
      logged([&] { result = Trainer(three_epochs().stop_on_non_finite(false)).fit(task, loader); });
  EXPECT_NE(log.find("the loss of step 3 is not finite; continuing (1 so far)"), std::string::npos) << log;
  EXPECT_EQ(log.find("is not finite"), log.rfind("is not finite")) << log;  // of one step only
  EXPECT_EQ(result.steps, 15);
  EXPECT_TRUE(std::isfinite(result.metrics.at("train_loss")));
  for (const at::Tensor& parameter : job.net->parameters())
    EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
}

TEST(TrainerTest, AccumulationEqualsTheWholeBatchWithinRounding) {
  // Without batch norm and dropout, whose numbers depend on how a batch is cut.
  const auto train_with = [](std::int64_t parts) {
    at::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Linear(16, 6));
    auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
    ClassificationTask task(net.ptr(), optimizer, nullptr, ClassificationOptions().accumulate(parts));
    data::Loader loader = make_loader();
    Trainer(three_epochs()).fit(task, loader);
    return net->parameters()[0].detach().clone();
  };
  const at::Tensor whole = train_with(1);
  EXPECT_TRUE(at::allclose(whole, train_with(2), 1e-5, 1e-6));
  EXPECT_TRUE(
      at::allclose(whole, train_with(3), 1e-5, 1e-6));  // 3 + 3 + 2 samples: weighted by what each part holds
}

TEST(TrainerTest, PartsThatTheLoaderHandsOutGiveTheBitsOfPartsThatTheTaskCuts) {
  const auto train_with = [](std::int64_t cut, std::int64_t read, int workers) {
    auto job = std::make_unique<Job>(ClassificationOptions().accumulate(cut));
    data::Loader loader(make_data(),
                        {.batch_size = kBatch, .parts = read, .workers = workers, .shuffle = true});
    EXPECT_EQ(Trainer(three_epochs()).fit(*job->task, loader).steps, 15);
    return job;
  };
  for (const std::int64_t parts : {2, 4}) {
    const auto cut = train_with(parts, 1, 0);
    for (const int workers : {0, 2}) {
      EXPECT_TRUE(same_parameters(cut->net, train_with(1, parts, workers)->net)) << parts << " parts";
    }
  }
}

TEST(TrainerTest, ATaskThatLeavesPartsUntakenIsAnError) {
  struct TakesTheFirst : ClassificationTask {
    using ClassificationTask::ClassificationTask;
    StepMetrics train_step(data::Batch&) override { return {}; }
  };
  torch::nn::Sequential net(torch::nn::Linear(6, 6));
  TakesTheFirst task(net.ptr(), std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1)),
                     nullptr);
  data::Loader loader(make_data(), {.batch_size = 8, .parts = 2});
  COHORT_EXPECT_THROW_WITH(Trainer(three_epochs()).fit(task, loader), UsageError,
                           "parts that were not taken");
}

TEST(TrainerTest, TheTimelineHoldsTheStagesOfTheFirstSteps) {
  TempDir folder;
  Job job;
  data::Loader loader = make_loader();
  constexpr std::int64_t kSteps = 3;
  Trainer(three_epochs().run_dir(folder.path()).save_every_steps(1).trace_steps(kSteps))
      .fit(*job.task, loader);
  const std::string trace = test::read_file(folder / "trace.json");
  const auto events = [&](const std::string& name) {
    std::int64_t count = 0;
    const std::string quoted = "\"" + name + "\"";
    for (std::size_t at = trace.find(quoted); at != std::string::npos; at = trace.find(quoted, at + 1))
      ++count;
    return count;
  };
  for (const char* name : {"data wait", "forward", "backward", "optimizer"})
    EXPECT_EQ(events(name), kSteps) << name;
  EXPECT_EQ(events("checkpoint"), kSteps - 1);  // recording ends with the last step, before it is saved
}

/// Two networks with an optimizer each.
struct TwoNetworks : Task {
  TwoNetworks() {
    at::manual_seed(1);
    a = torch::nn::Sequential(torch::nn::Linear(6, 4));
    b = torch::nn::Sequential(torch::nn::Linear(4, 6));
    first = std::make_shared<optim::Adam>(a->parameters(), optim::AdamOptions(1e-2));
    second = std::make_shared<optim::SGD>(b->parameters(), optim::SGDOptions(0.1).momentum(0.5));
    add_module("a", a.ptr());
    add_module("b", b.ptr());
    add_optimizer("first", first);
    add_optimizer("second", second);
  }
  StepMetrics train_step(data::Batch& batch) override {
    first->zero_grad();
    second->zero_grad();
    const at::Tensor loss = at::mse_loss(b->forward(a->forward(batch.input())), batch.input());
    loss.backward();
    first->step();
    second->step();
    return {{"loss", loss, static_cast<double>(batch.size)}};
  }
  torch::nn::Sequential a{nullptr}, b{nullptr};
  std::shared_ptr<optim::Optimizer> first, second;
};

TEST(TrainerTest, ATaskWithTwoModulesAndTwoOptimizersResumesExactly) {
  TempDir folder;
  TwoNetworks straight, first, second;
  data::Loader loader = make_loader();
  Trainer(three_epochs()).fit(straight, loader);
  Trainer(three_epochs().run_dir(folder.path()).max_steps(7)).fit(first, loader);
  Trainer(three_epochs().run_dir(folder.path()).resume("auto")).fit(second, loader);
  EXPECT_TRUE(same_parameters(straight.a, second.a));
  EXPECT_TRUE(same_parameters(straight.b, second.b));
}

TEST(TrainerTest, NamesOfModulesAndOptimizersAreUsedOnce) {
  struct Twice : Task {
    Twice() {
      torch::nn::Linear linear(1, 1);
      add_module("a", linear.ptr());
      add_module("a", linear.ptr());
    }
    StepMetrics train_step(data::Batch&) override { return {}; }
  };
  COHORT_EXPECT_THROW_WITH(Twice(), UsageError, "a module named \"a\" was added twice");
}

TEST(TrainerTest, AnEmptyLoaderIsRejected) {
  Job job;
  data::Loader loader(make_data(), {.batch_size = 100, .drop_last = true});
  COHORT_EXPECT_THROW_WITH(Trainer(three_epochs()).fit(*job.task, loader), UsageError, "has no batch");
}

}  // namespace
}  // namespace cohort::train
