// `cohort train` in processes that agents start, kill and stop as a seed says: the run's folder is that of a
// run which nothing disturbed. Each test makes its zygote first, before this process has threads.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <fstream>
#include <iostream>

#include "cohort/base/env.h"
#include "cohort/models/registry.h"
#include "cohort/train/run.h"
#include "tests/elastic/fake_agents.h"
#include "tests/support/seeds.h"
#include "tests/train/elastic/fake_run.h"
#include "tests/train/elastic/run_files.h"

namespace cohort::train {
namespace {

struct MlpWithDropoutImpl : torch::nn::Module {
  explicit MlpWithDropoutImpl(const models::ModelOptions& options)
      : in(register_module(
            "in", torch::nn::Linear(options.in_channels * options.image_size * options.image_size, 24))),
        dropout(register_module("dropout", torch::nn::Dropout(0.4))),
        out(register_module("out", torch::nn::Linear(24, options.num_classes))) {}
  at::Tensor forward(const at::Tensor& input) {
    return out->forward(dropout->forward(in->forward(input.flatten(1)).relu()));
  }
  torch::nn::Linear in;
  torch::nn::Dropout dropout;
  torch::nn::Linear out;
};
TORCH_MODULE(MlpWithDropout);

/// Convolutions with batch norm around a shortcut, as in a ResNet.
struct ShortcutModelImpl : torch::nn::Module {
  explicit ShortcutModelImpl(const models::ModelOptions& options)
      : stem(register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(6))),
        conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 6, 3).padding(1)))),
        conv_norm(register_module("conv_norm", torch::nn::BatchNorm2d(6))),
        head(register_module("head", torch::nn::Linear(6, options.num_classes))) {}
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = norm->forward(stem->forward(input)).relu();
    return head->forward((x + conv_norm->forward(conv->forward(x)).relu()).mean({2, 3}));
  }
  torch::nn::Conv2d stem;
  torch::nn::BatchNorm2d norm;
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d conv_norm;
  torch::nn::Linear head;
};
TORCH_MODULE(ShortcutModel);

COHORT_REGISTER_MODEL("shortcut_model", [](const models::ModelOptions& options) {
  return torch::nn::AnyModule(ShortcutModel(options).ptr());
});
COHORT_REGISTER_MODEL("mlp_with_dropout", [](const models::ModelOptions& options) {
  return torch::nn::AnyModule(MlpWithDropout(options).ptr());
});

struct ElasticModel {
  const char* name;
  const char* config;
  std::int64_t steps, samples;
  int num_events, max_event_ms;  // of a schedule
};

// 4 virtual ranks.
constexpr ElasticModel kElasticModels[] = {{"an MLP with dropout",
                                            "model: {name: mlp_with_dropout, num_classes: 4}\n"
                                            "data: {type: synthetic, synthetic_train: 42, synthetic_val: 21, "
                                            "image_size: 4, color: gray, workers: 1}\n"
                                            "train: {epochs: 10, batch_size: 2}\n",
                                            60, 42, 12, 25},
                                           {"a VGG with dropout and batch norm",
                                            "model: {name: vgg11_bn, num_classes: 4, width: 0.05, pools: 2}\n"
                                            "data: {type: synthetic, synthetic_train: 40, synthetic_val: 16, "
                                            "image_size: 8, color: gray, workers: 1}\n"
                                            "train: {epochs: 6, batch_size: 2}\n",
                                            30, 40, 10, 150},
                                           {"a net with a shortcut and batch norm",
                                            "model: {name: shortcut_model, num_classes: 4}\n"
                                            "data: {type: synthetic, synthetic_train: 42, synthetic_val: 21, "
                                            "image_size: 6, color: gray, workers: 1}\n"
                                            "train: {epochs: 8, batch_size: 2}\noptim: {name: adamw}\n",
                                            48, 42, 12, 25},
                                           {"a ResNet-18",
                                            "model: {name: resnet18, num_classes: 4}\n"
                                            "data: {type: synthetic, synthetic_train: 16, synthetic_val: 8, "
                                            "image_size: 32, color: rgb, workers: 1}\n"
                                            "train: {epochs: 2, batch_size: 2}\n",
                                            4, 16, 6, 600}};

config::Config elastic_config_of(const ElasticModel& model, const std::filesystem::path& folder,
                                 bool is_elastic) {
  return config::load_config_text(
      model.config, "elastic.yaml",
      {"run.dir=" + folder.string(), "run.progress=off", "run.tensorboard=false", "run.log_every=1",
       "run.keep=0", "run.save_every=3", "optim.lr=0.05", "optim.clip_norm=1", "schedule.name=cosine",
       "train.threads=1", "train.device=cpu", "distributed.virtual_ranks=4",
       is_elastic ? "distributed.elastic=true" : "run.seed=1"});
}

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

/// The files of a run, as if each had been elastic, and all in one folder.
std::map<std::string, std::string> comparable_files(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files = test::run_files(folder);
  for (auto& [name, content] : files) {
    if (!name.ends_with("state.json")) continue;
    content = replace_all(replace_all(content, folder.string(), "FOLDER"), "elastic: false", "elastic: true");
  }
  return files;
}

// As one text, in which no file can be taken for another.
std::string packed(const std::map<std::string, std::string>& files) {
  std::string text;
  for (const auto& [name, content] : files) {
    text += name + "\n" + std::to_string(content.size()) + "\n" + content;
  }
  return text;
}

int train_child() {
  try {
    test::stop_at_test_point();
    const std::filesystem::path folder = *base::env_string("TEST_FOLDER");
    const ElasticModel& model = kElasticModels[*base::env_int("TEST_HIDDEN")];
    const RunResult result = run_training(elastic_config_of(model, folder / "run", true), "cohort train");
    if (result.fit.steps == 0) return 0;  // it waited in reserve
    const std::map<std::string, std::string> files = comparable_files(folder / "run");
    const std::string fault = test::ledger_fault(files.at("ledger.csv"), model.steps, model.samples);
    if (!fault.empty()) throw std::runtime_error("the ledger: " + fault);
    std::ofstream ledger(folder / "ledger", std::ios::app);
    for (std::int64_t step = 1; step <= model.steps; ++step) ledger << step << "\n";
    std::ofstream(folder / ("result " + std::to_string(::getpid())), std::ios::binary) << packed(files);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "child failed: " << error.what() << std::endl;
    return 1;
  }
}

/// Returns the files of an elastic run of one process that nothing disturbs.
std::map<std::string, std::string> undisturbed_files(const ElasticModel& model,
                                                     const std::filesystem::path& folder) {
  test::FakeRun run(4, {}, [&](int, std::shared_ptr<elastic::Session> session) {
    run_training(elastic_config_of(model, folder, true), "cohort train", std::move(session));
  });
  run.run(1);
  return comparable_files(folder);
}

TEST(ElasticTrainProcessesTest, AnUndisturbedRunHasTheBytesOfOneThatIsNotElastic) {
  for (const int model : {0, 2}) {
    const test::TempDir dir;
    run_training(elastic_config_of(kElasticModels[model], dir / "run", false), "cohort train");
    auto files = undisturbed_files(kElasticModels[model], dir / "elastic");
    files.erase("ledger.csv");  // of elastic runs alone
    EXPECT_TRUE(packed(files) == packed(comparable_files(dir / "run"))) << kElasticModels[model].name;
  }
}

// `is_alone`: there is one process, whose successor has nobody else to get the state from.
void expect_same_folders(int model, const test::Seeds& seeds, bool is_alone = false) {
  test::Zygote zygote(train_child);
  const test::TempDir dir;
  const std::string expected = packed(undisturbed_files(kElasticModels[model], dir / "run"));
  int kills = 0, generations = 0, heirs = 0, lost = 0;
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    test::FakeAgents agents(zygote, {.seed = seed + 1,
                                     .total_steps = static_cast<std::uint64_t>(kElasticModels[model].steps),
                                     .num_events = kElasticModels[model].num_events,
                                     .max_event_ms = kElasticModels[model].max_event_ms,
                                     .hidden = model,
                                     .max_processes = is_alone ? 1 : 4,
                                     .loses_last = is_alone});
    const std::string error = agents.run();
    heirs += agents.counts.heirs;
    kills += agents.counts.kills;
    generations += agents.counts.generations;
    lost += error == test::FakeAgents::kStateLost ? 1 : 0;
    if (error == test::FakeAgents::kStateLost) continue;  // it was killed while it changed its state
    ASSERT_EQ(error, "") << "COHORT_RANDOM_FIRST=" << seed << "\n" << agents.story();
    const std::vector<std::string> results = agents.results();
    ASSERT_FALSE(results.empty());
    for (const std::string& result : results) {
      ASSERT_TRUE(result == expected) << "COHORT_RANDOM_FIRST=" << seed << ": other bytes\n"
                                      << agents.story();
    }
  }
  std::cout << kElasticModels[model].name << ": " << seeds.count() << " schedules, " << generations
            << " generations, " << kills << " processes killed, " << heirs
            << " began with what another one had left, " << lost << " runs lost their state\n";
  // On a busy host a schedule's events may come to nothing.
  if (seeds.count() >= 3) EXPECT_GT(generations, static_cast<int>(seeds.count()));
  EXPECT_TRUE(!is_alone || heirs > 0);
  EXPECT_LT(lost, static_cast<int>(seeds.count()));
}

TEST(ElasticTrainProcessesTest, AnMlpWithDropoutHasTheSameBytesUnderAnySchedule) {
  expect_same_folders(0, test::Seeds::usual(3));
}

TEST(ElasticTrainProcessesTest, AVggHasTheSameBytesUnderAnySchedule) {
  expect_same_folders(1, test::Seeds::usual(1));
}

TEST(ElasticTrainProcessesTest, ANetWithAShortcutHasTheSameBytesUnderAnySchedule) {
  expect_same_folders(2, test::Seeds::usual(3));
}

TEST(ElasticTrainProcessesTest, ASuccessorOfAProcessThatWasAloneHasTheSameBytes) {
  expect_same_folders(2, test::Seeds::usual(3), /*is_alone=*/true);
}

// It takes half a minute a schedule.
TEST(ElasticTrainSlowChild, DISABLED_AResNetHasTheSameBytesUnderAnySchedule) {
  expect_same_folders(3, test::Seeds::usual(1));
}

}  // namespace
}  // namespace cohort::train
