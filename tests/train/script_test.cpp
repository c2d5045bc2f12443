// train.script: the run of a Trainer that records and replays its step is eager mode's, bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <mutex>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/data/synthetic.h"
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

struct Outcome {
  std::map<std::string, at::Tensor> state;                 // parameters and buffers at the end
  std::vector<std::map<std::string, double>> epochs = {};  // what each reported
};

struct Job {
  ClassificationOptions options = {};
  std::string optimizer = "sgd";
  std::string model = "vgg11_bn";
  std::string head = "default";  // with dropout
  std::int64_t stop_after = 0;
  std::filesystem::path folder = {};
  std::shared_ptr<parallel::GradientSync> gradient_sync = nullptr;
  std::int64_t poisoned_step = -1;
};

struct PoisonedTask : ClassificationTask {
  using ClassificationTask::ClassificationTask;
  StepMetrics train_step(data::Batch& batch) override {
    if (step++ == poisoned) batch.input().fill_(std::numeric_limits<float>::infinity());
    return ClassificationTask::train_step(batch);
  }
  std::int64_t step = 0, poisoned = -1;
};

struct Epochs : Callback {
  explicit Epochs(Outcome& into) : run(into) {}
  void on_epoch_end(const EpochReport& report) override { run.epochs.push_back(report.metrics); }
  Outcome& run;
};

data::Loader loader_of(std::int64_t samples, const parallel::GradientSync& gradient_sync, bool shuffle) {
  data::LoaderOptions options{.shuffle = shuffle, .seed = 2};
  options.global_batch_size = 8;
  options.rank = gradient_sync.rank();
  options.world_size = gradient_sync.size();
  return data::Loader(std::make_shared<data::SyntheticDataset>(
                          data::SyntheticOptions{.size = samples, .shape = {1, 16, 16}, .num_classes = 4}),
                      options);
}

// Seven steps an epoch, the last of half a batch; validation has a short batch too.
Outcome train(const Job& job) {
  static std::mutex mutex;  // the generator that initial values come from is the process's
  std::unique_lock lock(mutex);
  torch::nn::AnyModule model = test::small_vgg(job.model, job.head);
  lock.unlock();
  optim::OptimizerOptions options{.name = job.optimizer, .lr = 0.01};
  if (job.optimizer == "sgd") options.momentum = 0.9;
  PoisonedTask task(model, optim::make_optimizer(options, {{.params = model.ptr()->parameters()}}),
                    optim::cosine(21), job.options);
  task.poisoned = job.poisoned_step;
  const auto gradient_sync =
      job.gradient_sync != nullptr ? job.gradient_sync : std::make_shared<parallel::GradientSync>();
  data::Loader loader = loader_of(52, *gradient_sync, true), eval = loader_of(12, *gradient_sync, false);
  TrainerOptions trainer_options;
  trainer_options.epochs(3)
      .seed(9)
      .max_steps(job.stop_after)
      .stop_on_non_finite(false)
      .gradient_sync(gradient_sync);
  if (!job.folder.empty()) trainer_options.run_dir(job.folder).resume("auto");
  Trainer trainer(trainer_options);
  Outcome run;
  trainer.add_callback(std::make_shared<Epochs>(run));
  trainer.fit(task, loader, &eval);
  for (const auto& entry : model.ptr()->named_parameters()) run.state[entry.key()] = entry.value().detach();
  for (const auto& entry : model.ptr()->named_buffers()) run.state[entry.key()] = entry.value();
  return run;
}

void expect_same(const Outcome& expected, const Outcome& got) {
  EXPECT_EQ(expected.epochs, got.epochs);
  ASSERT_EQ(expected.state.size(), got.state.size());
  for (const auto& [name, value] : expected.state) EXPECT_TRUE(at::equal(value, got.state.at(name))) << name;
}

// What the library says while `work` runs.
template <typename Work>
std::string logged(const Work& work) {
  std::string text;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { text += std::string(line) + "\n"; });
  work();
  base::set_log_sink({});
  return text;
}

std::int64_t count(const std::string& text, const std::string& part) {
  std::int64_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

Job scripted(Job job) {
  job.options.script(true);
  return job;
}

const std::map<std::string, ClassificationOptions> kFeatures = {
    {"plain", ClassificationOptions()},
    {"accumulation", ClassificationOptions().accumulate(3)},
    {"bf16", ClassificationOptions().bf16(true)},
    {"clipping", ClassificationOptions().clip_norm(0.5)},
    {"smoothing", ClassificationOptions().label_smoothing(0.1)},
    {"all", ClassificationOptions().accumulate(2).bf16(true).clip_norm(0.5).label_smoothing(0.1)}};

TEST(TrainScriptTest, LossesAndWeightsAreEagersWithEveryFeature) {
  for (const auto& [name, options] : kFeatures) {
    SCOPED_TRACE(name);
    for (const char* optimizer : {"sgd", "adamw"}) {
      const Job job{.options = options, .optimizer = optimizer};
      const Outcome eager = train(job);
      Outcome replayed;
      const std::string log = logged([&] { replayed = train(scripted(job)); });
      expect_same(eager, replayed);
      EXPECT_EQ(count(log, "runs eagerly"), 0) << log;
      EXPECT_GE(count(log, "[script.training] replayed from now on"), 2) << log;  // and the short batch
      EXPECT_GE(count(log, "[script.evaluation] replayed from now on"), 1) << log;
    }
  }
}

TEST(TrainScriptTest, AStepThatIsNotFiniteIsGoneOverAsInEagerMode) {
  for (const std::int64_t step : {0, 1, 5}) {                // two that would be recorded, and a replay
    const Job job{.model = "vgg11", .poisoned_step = step};  // batch norm would keep the infinity
    expect_same(train(job), train(scripted(job)));
  }
}

TEST(TrainScriptTest, ARunThatWasStoppedContinuesBitForBitWithOrWithoutIt) {
  const Outcome straight = train(Job());
  for (const bool first : {false, true}) {
    for (const bool second : {false, true}) {
      const test::TempDir folder;
      train({.options = ClassificationOptions().script(first), .stop_after = 10, .folder = folder.path()});
      const Outcome resumed =
          train({.options = ClassificationOptions().script(second), .folder = folder.path()});
      for (const auto& [name, value] : straight.state) {
        EXPECT_TRUE(at::equal(value, resumed.state.at(name))) << name;
      }
    }
  }
}

TEST(TrainScriptTest, RanksHaveTheBitsOfEagerRanks) {
  for (const char* gradient_sync : {"ddp", "average"}) {
    std::vector<Outcome> runs;
    std::string log;
    for (const bool is_scripted : {false, true}) {
      log = logged([&] {
        test::run_ranks(2, "gloo", [&](comm::Group& group) {
          Job job{.head = "linear",
                  .gradient_sync =
                      parallel::make_gradient_sync(gradient_sync, group)};  // threads share a generator
          job.options.script(is_scripted);
          Outcome outcome = train(job);
          if (group.rank() == 0) runs.push_back(std::move(outcome));
        });
      });
    }
    ASSERT_EQ(runs.size(), 2U);
    expect_same(runs[0], runs[1]);
    EXPECT_EQ(count(log, "runs eagerly"), 0) << log;
    EXPECT_GE(count(log, "[script.training] replayed from now on"), 1) << log;
    EXPECT_LE(count(log, "[script.training] replayed from now on"), 2) << "said by rank 0 alone\n" << log;
  }
}

// A net that counts its calls, and may hand a number of a tensor to C++.
struct CountingImpl : torch::nn::Module {
  explicit CountingImpl(bool looks) : looks_(looks) { register_module("head", head_); }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    const at::Tensor y = head_->forward(x.flatten(1));
    return looks_ ? y * y.detach().abs().max().item<double>() : y;
  }
  int calls = 0;

 private:
  bool looks_;
  torch::nn::Linear head_{256, 4};
};
TORCH_MODULE(Counting);

// Two epochs of four steps; returns what the log said.
std::string log_of(Counting net) {
  ClassificationTask task(net.ptr(), optim::make_optimizer({.name = "sgd"}, {{.params = net->parameters()}}),
                          nullptr, ClassificationOptions().script(true));
  data::Loader loader = loader_of(32, parallel::GradientSync(), true);
  return logged([&] { Trainer(TrainerOptions().epochs(2)).fit(task, loader); });
}

TEST(TrainScriptTest, AModelThatIsReplayedRunsInVerifiedCallsOnly) {
  Counting net(false);
  log_of(net);
  EXPECT_EQ(net->calls, 5) << "of 8: 1, 2, 3, 4 and 8";
}

TEST(TrainScriptTest, WhatCannotBeReplayedStaysEagerAndTheLogSaysWhyOnce) {
  Counting net(true);
  const std::string log = log_of(net);
  EXPECT_EQ(net->calls, 8);
  EXPECT_EQ(count(log, "[script.training] runs eagerly for Float [8, 1, 16, 16], Long [8]"), 1) << log;
  EXPECT_EQ(count(log, "_local_scalar_dense"), 1) << log;
}

TEST(TrainScriptTest, AStepOfItsOwnIsRejected) {
  torch::nn::AnyModule model = test::small_vgg("vgg11");
  const config::DistributedConfig config{.model = "pipeline",
                                         .devices = "cpu:0/a, cpu:0/b",
                                         .device_map = {{"features", "cpu:0/a"}, {"classifier", "cpu:0/b"}}};
  const MeasuredStep measured{
      .input = {.name = "input", .shape = {1, 16, 16}}, .plan = {.part = 8}, .optim = {}};
  COHORT_EXPECT_THROW_WITH(ClassificationTask(model, make_model_runner(config, model, at::kCPU, measured),
                                              nullptr, nullptr, ClassificationOptions().script(true)),
                           UsageError, "script: a step that overlaps forward and backward");
}

}  // namespace
}  // namespace cohort::train
