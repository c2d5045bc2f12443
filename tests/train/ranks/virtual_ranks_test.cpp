// Training with virtual ranks: any number of processes ends with the same bits. Processes are threads with a
// group of their own over Gloo; where dropout draws from the global generator they are processes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>

#include "cohort/base/error.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/models/registry.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/trainer.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

constexpr std::int64_t kVirtualRanks = 4;
constexpr std::int64_t kVirtualStep = 10;     // 3, 3, 2 and 2
constexpr std::int64_t kVirtualSamples = 32;  // steps of 10, 10, 10 and 2: two virtual ranks have none

/// Two convolutions with batch norm around a shortcut, as in a ResNet.
struct ShortcutNetImpl : torch::nn::Module {
  ShortcutNetImpl() {
    stem = register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(6));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 6, 3).padding(1)));
    conv_norm = register_module("conv_norm", torch::nn::BatchNorm2d(6));
    head = register_module("head", torch::nn::Linear(6, 4));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = norm->forward(stem->forward(input)).relu();
    return head->forward((x + conv_norm->forward(conv->forward(x)).relu()).mean({2, 3}));
  }
  torch::nn::Conv2d stem{nullptr}, conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr}, conv_norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ShortcutNet);

torch::nn::AnyModule make_virtual_net(const std::string& name) {
  static std::mutex mutex;  // at::manual_seed is the process's, and the processes are threads of one
  const std::lock_guard lock(mutex);
  at::manual_seed(3);
  if (name == "shortcut") return torch::nn::AnyModule(ShortcutNet());
  if (name == "vgg") {
    return models::make_model({.name = "vgg11_bn",
                               .num_classes = 4,
                               .in_channels = 1,
                               .image_size = 8,
                               .width = 0.05,
                               .pools = 2,
                               .head = "linear",
                               .extra = {}});
  }
  return models::make_model(
      {.name = "mlp", .num_classes = 4, .in_channels = 1, .image_size = 8, .extra = {{"hidden", "24"}}});
}

std::shared_ptr<data::Dataset> waves(std::int64_t samples, bool has_infinity = false) {
  at::Tensor input =
      at::arange(samples * 64, at::kDouble).mul(0.7).sin().to(at::kFloat).view({samples, 1, 8, 8});
  const at::Tensor target = input.flatten(1).narrow(1, 0, 4).argmax(1);
  if (has_infinity) input[13].fill_(std::numeric_limits<float>::infinity());
  return std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, target});
}

/// What a test trains.
struct VirtualSetting {
  std::string net = "mlp";
  ClassificationOptions options = ClassificationOptions().clip_norm(0.7);
  std::int64_t parts = 1;
  bool has_infinity = false;  // in one sample
  std::function<void(TrainerOptions&)> change = [](TrainerOptions&) {};
};

/// All that a run ends with.
struct VirtualOutcome {
  std::map<std::string, at::Tensor> tensors;  // parameters, buffers, and the optimizer's
  FitResult fit;
  std::vector<std::map<std::string, double>> averages;  // after each step
};

struct StepAverages : Callback {
  void on_step_end(const StepReport& report) override { averages.push_back(report.averages); }
  std::vector<std::map<std::string, double>> averages;
};

data::LoaderOptions loader_shares(const parallel::GradientSync& sync, const VirtualSetting& setting) {
  data::LoaderOptions options{.global_batch_size = kVirtualStep, .parts = setting.parts};
  const parallel::ShareRange shares = sync.shares();
  options.rank = shares.first;
  options.num_shares = shares.count;
  options.world_size = shares.of;
  options.shuffle = true;
  options.seed = 5;
  options.last_batch = data::LastBatchPolicy::kKeep;
  return options;
}

VirtualOutcome train_virtual_ranks(const VirtualSetting& setting,
                                   const std::shared_ptr<parallel::VirtualRankSync>& sync) {
  torch::nn::AnyModule net = make_virtual_net(setting.net);
  const auto optimizer = std::make_shared<optim::SGD>(
      net.ptr()->parameters(), optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
  ClassificationTask task(net, optimizer, optim::cosine(8), setting.options);
  data::Loader loader(waves(kVirtualSamples, setting.has_infinity), loader_shares(*sync, setting));
  data::Loader eval(waves(7), loader_shares(*sync, {}));
  TrainerOptions options = TrainerOptions().epochs(2).seed(11).log_every(1).gradient_sync(sync);
  setting.change(options);
  Trainer trainer(options);
  const auto averages = std::make_shared<StepAverages>();
  trainer.add_callback(averages);
  VirtualOutcome outcome;
  outcome.fit = trainer.fit(task, loader, &eval);
  outcome.averages = averages->averages;
  for (const auto& entry : net.ptr()->named_parameters())
    outcome.tensors[entry.key()] = entry.value().detach();
  for (const auto& entry : net.ptr()->named_buffers()) outcome.tensors[entry.key()] = entry.value();
  for (const auto& [name, tensor] : optimizer->state().tensors) outcome.tensors["optimizer " + name] = tensor;
  return outcome;
}

/// Trains on `processes` processes and returns what each of them ended with.
std::vector<VirtualOutcome> train_virtual_ranks_on(int processes, const VirtualSetting& setting) {
  const auto sync_of = [](comm::Group group) {
    return std::make_shared<parallel::VirtualRankSync>(
        std::move(group),
        parallel::VirtualRankOptions{.num_virtual_ranks = kVirtualRanks, .bucket_bytes = 4096});
  };
  if (processes == 1) return {train_virtual_ranks(setting, sync_of({}))};
  std::vector<VirtualOutcome> outcomes(static_cast<std::size_t>(processes));
  test::run_ranks(processes, "gloo", [&](comm::Group& group) {
    outcomes[static_cast<std::size_t>(group.rank())] = train_virtual_ranks(setting, sync_of(group));
  });
  return outcomes;
}

bool has_same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

void expect_same_outcome(const VirtualOutcome& found, const VirtualOutcome& expected,
                         const std::string& what) {
  SCOPED_TRACE(what);
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) {
    EXPECT_TRUE(has_same_bytes(found.tensors.at(name), tensor)) << name;
  }
  EXPECT_EQ(found.fit.metrics, expected.fit.metrics);
  EXPECT_EQ(found.fit.best, expected.fit.best);
  EXPECT_EQ(found.fit.best_epoch, expected.fit.best_epoch);
  EXPECT_EQ(found.averages, expected.averages);
}

void expect_same_on_any_number(const VirtualSetting& setting) {
  const VirtualOutcome expected = train_virtual_ranks_on(1, setting).front();
  EXPECT_EQ(expected.fit.steps, 8);
  EXPECT_GT(expected.fit.best_epoch, 0);
  for (int processes = 2; processes <= kVirtualRanks; ++processes) {
    int rank = 0;
    for (const VirtualOutcome& outcome : train_virtual_ranks_on(processes, setting)) {
      expect_same_outcome(outcome, expected, base::concat("rank ", rank++, " of ", processes));
    }
  }
}

TEST(VirtualRanksTest, APerceptronHasTheSameBitsOnAnyNumberOfProcesses) {
  expect_same_on_any_number({});
}

TEST(VirtualRanksTest, ANetWithBatchNormHasTheSameBitsOnAnyNumberOfProcesses) {
  expect_same_on_any_number({.net = "shortcut"});
}

TEST(VirtualRanksTest, AVggInPartsHasTheSameBitsOnAnyNumberOfProcesses) {
  expect_same_on_any_number(
      {.net = "vgg", .options = ClassificationOptions().label_smoothing(0.1), .parts = 2});
}

TEST(VirtualRanksTest, Bfloat16HasTheSameBitsOnAnyNumberOfProcesses) {
  expect_same_on_any_number({.net = "shortcut", .options = ClassificationOptions().bf16(true)});
}

TEST(VirtualRanksTest, ScriptModeHasTheSameBitsOnAnyNumberOfProcesses) {
  const VirtualOutcome eager = train_virtual_ranks_on(1, {.net = "shortcut"}).front();
  const VirtualSetting scripted{.net = "shortcut",
                                .options = ClassificationOptions().clip_norm(0.7).script(true)};
  for (const int processes : {1, 3}) {
    for (const VirtualOutcome& outcome : train_virtual_ranks_on(processes, scripted)) {
      expect_same_outcome(outcome, eager, base::concat(processes, " processes"));
    }
  }
}

TEST(VirtualRanksTest, VirtualRanksTrainWhatRanksTrainWithinRounding) {
  std::vector<VirtualOutcome> plain(kVirtualRanks);
  test::run_ranks(kVirtualRanks, "gloo", [&](comm::Group& group) {
    torch::nn::AnyModule net = make_virtual_net("mlp");
    const auto optimizer = std::make_shared<optim::SGD>(
        net.ptr()->parameters(), optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
    ClassificationTask task(net, optimizer, optim::cosine(8), ClassificationOptions().clip_norm(0.7));
    const auto sync = parallel::make_gradient_sync("average", group);
    data::Loader loader(waves(kVirtualSamples), loader_shares(*sync, {}));
    Trainer(TrainerOptions().epochs(2).seed(11).gradient_sync(sync)).fit(task, loader);
    for (const auto& entry : net.ptr()->named_parameters()) {
      plain[static_cast<std::size_t>(group.rank())].tensors[entry.key()] = entry.value().detach();
    }
  });
  const VirtualOutcome expected = train_virtual_ranks_on(2, {}).front();
  for (const auto& [name, tensor] : plain[0].tensors) {
    EXPECT_TRUE(at::allclose(tensor, expected.tensors.at(name), 1e-4, 1e-6)) << name;
  }
}

TEST(VirtualRanksTest, ARunThatResumesOnOtherNumbersOfProcessesEndsWithTheSameBits) {
  // A run that stops in an epoch is evaluated there, which the straight run is not.
  const VirtualSetting straight_run{.net = "shortcut",
                                    .change = [](TrainerOptions& options) { options.eval_every(0); }};
  const VirtualOutcome straight = train_virtual_ranks_on(2, straight_run).front();
  const test::TempDir dir;
  const auto until = [&](std::int64_t steps) {
    return VirtualSetting{
        .net = "shortcut", .change = [&dir, steps](TrainerOptions& options) {
          options.run_dir(dir.path()).resume("auto").max_steps(steps).save_every_steps(1).eval_every(0);
        }};
  };
  EXPECT_EQ(train_virtual_ranks_on(4, until(3)).front().fit.steps, 3);
  EXPECT_EQ(train_virtual_ranks_on(1, until(6)).front().fit.steps, 6);
  for (const VirtualOutcome& outcome : train_virtual_ranks_on(3, until(0))) {
    EXPECT_EQ(outcome.fit.steps, 8);
    VirtualOutcome end = outcome;
    end.averages = straight.averages;  // of the last start alone
    expect_same_outcome(end, straight, "4, then 1, then 3 processes");
    EXPECT_EQ(outcome.averages.back(), straight.averages.back());
  }
}

TEST(VirtualRanksTest, AStepThatIsNotFiniteIsLeftOutOnAllAndNamesItsVirtualRank) {
  VirtualSetting setting{.net = "shortcut", .has_infinity = true};
  std::string first;
  for (int processes = 1; processes <= kVirtualRanks; ++processes) {
    std::string what;
    try {
      train_virtual_ranks_on(processes, setting);
    } catch (const NumericError& error) {
      what = error.what();
    }
    const std::size_t at = what.find("is not finite on virtual rank ");
    ASSERT_NE(at, std::string::npos) << what;
    const std::string named = what.substr(0, at + 31);
    if (processes == 1) first = named;
    EXPECT_EQ(named, first) << processes << " processes";
  }
  setting.change = [](TrainerOptions& options) { options.stop_on_non_finite(false); };
  expect_same_on_any_number(setting);
}

TEST(VirtualRanksTest, ATaskThatDoesNotTakeAllPartsIsRejected) {
  /// Averages what it has of its first virtual rank.
  struct Hasty : Task {
    Hasty() : net(64, 4), optimizer(std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1))) {
      add_module("", net.ptr());
      add_optimizer("", optimizer);
    }
    StepMetrics train_step(data::Batch& batch) override {
      const at::Tensor loss = at::cross_entropy_loss(net->forward(batch.input().flatten(1)), batch.target());
      loss.backward();
      if (averages) average_gradients(*optimizer, static_cast<double>(batch.size));
      return {{"loss", loss.detach(), static_cast<double>(batch.size)}};
    }
    torch::nn::Linear net;
    std::shared_ptr<optim::SGD> optimizer;
    bool averages = true;
  };
  const auto sync = std::make_shared<parallel::VirtualRankSync>(
      comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = kVirtualRanks});
  data::Loader loader(waves(kVirtualSamples), loader_shares(*sync, {})),
      other(waves(kVirtualSamples), {.batch_size = 4});
  Trainer trainer(TrainerOptions().gradient_sync(sync));
  Hasty task;
  COHORT_EXPECT_THROW_WITH(trainer.fit(task, loader), UsageError,
                           "averaged before all 4 virtual ranks of this process were computed. Try: while "
                           "(batch.advance()) before average_gradients()");
  loader.set_epoch(0);
  task.averages = false;
  COHORT_EXPECT_THROW_WITH(trainer.fit(task, loader), UsageError,
                           "did not average gradients over the 4 virtual ranks");
  COHORT_EXPECT_THROW_WITH(
      trainer.fit(task, other), UsageError,
      "the training loader reads 1 shares of 1 from 0 on, and this process computes 4 of 4");
}

TEST(VirtualRanksTest, AResumeThatWouldHaveOtherBitsIsRejected) {
  const test::TempDir dir;
  const auto with = [&](std::int64_t virtual_ranks, int threads) {
    const auto sync = std::make_shared<parallel::VirtualRankSync>(
        comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = virtual_ranks});
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    const VirtualSetting setting{
        .change = [&](TrainerOptions& options) { options.run_dir(dir.path()).resume("auto").max_steps(2); }};
    try {
      train_virtual_ranks(setting, sync);
    } catch (...) {
      at::set_num_threads(before);
      throw;
    }
    at::set_num_threads(before);
  };
  with(4, 1);
  COHORT_EXPECT_THROW_WITH(with(2, 1), UsageError,
                           "was made with 4 virtual ranks, this run has 2. Try: distributed.virtual_ranks=4");
  COHORT_EXPECT_THROW_WITH(
      with(4, 2), UsageError,
      "was made with 1 threads in each process, and has virtual ranks, this run has 2. Try: "
      "train.threads=1");
  with(4, 1);
}

TEST(VirtualRanksTest, AnotherInstructionSetIsRejectedByName) {
  RunState state;
  state.virtual_ranks = 4;
  state.threads = at::get_num_threads();
  check_same_bits(state, "runs/a", 4);  // an older version did not write the instruction set
  state.instruction_set = instruction_set();
  check_same_bits(state, "runs/a", 4);
  state.instruction_set = "ALTIVEC";
  COHORT_EXPECT_THROW_WITH(
      check_same_bits(state, "runs/a", 4), UsageError,
      base::concat("runs/a was made with ALTIVEC instructions, and has virtual ranks, this "
                   "run has ",
                   instruction_set()));
  state.virtual_ranks = 0;
  check_same_bits(state, "runs/a", 0);
}

}  // namespace
}  // namespace cohort::train
