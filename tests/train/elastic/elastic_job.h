#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/classification.h"
#include "cohort/train/sinks/sink_callbacks.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/train/elastic/fake_run.h"
#include "tests/train/elastic/run_files.h"

/// A small elastic run over a fake session, whose files tests compare with those of an undisturbed one.
namespace cohort::train {

inline constexpr int kElasticRanks = 4;
inline constexpr std::int64_t kElasticSamples = 32;  // steps of 10, 10, 10 and 2: two virtual ranks have none

/// How a test's run is.
struct ElasticSetting {
  std::string optimizer = "sgd";
  bool script = false;
  int processes = 3;
  std::function<void(TrainerOptions&)> change = [](TrainerOptions&) {};
  std::function<void(const StepReport&)> on_step = nullptr;
  std::function<void(const FitInfo&)> on_start = nullptr;
  std::function<void(ClassificationOptions&)> step = [](ClassificationOptions&) {};
};

inline std::shared_ptr<data::Dataset> elastic_data(std::int64_t samples) {
  const at::Tensor input =
      at::arange(samples * 12, at::kDouble).mul(0.7).sin().to(at::kFloat).view({samples, 1, 3, 4});
  return std::make_shared<data::TensorDataset>(
      std::vector<at::Tensor>{input, input.flatten(1).narrow(1, 0, 4).argmax(1)});
}

inline data::LoaderOptions elastic_loader(bool shuffle) {
  data::LoaderOptions options{.global_batch_size = 10};
  options.num_shares = options.world_size = kElasticRanks;
  options.shuffle = shuffle;
  options.seed = 5;
  options.last_batch = data::LastBatchPolicy::kKeep;
  return options;
}

/// A classifier with batch norm.
inline std::shared_ptr<torch::nn::SequentialImpl> elastic_net() {
  // Made once: threads that train draw from the same generator.
  static const auto prototype = [] {
    at::manual_seed(3);
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)),
                                 torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::Flatten(),
                                 torch::nn::Linear(48, 4))
        .ptr();
  }();
  return std::dynamic_pointer_cast<torch::nn::SequentialImpl>(prototype->clone());
}

inline std::shared_ptr<optim::Optimizer> elastic_optimizer(const std::string& name,
                                                           std::vector<at::Tensor> parameters) {
  if (name == "adam") return std::make_shared<optim::Adam>(std::move(parameters), optim::AdamOptions(0.01));
  return std::make_shared<optim::SGD>(std::move(parameters),
                                      optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
}

inline FitResult train_elastic(const ElasticSetting& setting, const std::filesystem::path& folder,
                               std::shared_ptr<elastic::Session> session) {
  const auto net = elastic_net();
  const auto optimizer = elastic_optimizer(setting.optimizer, net->parameters());
  ClassificationOptions step = ClassificationOptions().clip_norm(0.7).script(setting.script);
  setting.step(step);
  ClassificationTask task(net, optimizer, optim::cosine(8), step);
  data::Loader loader(elastic_data(kElasticSamples), elastic_loader(true));
  data::Loader eval(elastic_data(9), elastic_loader(false));
  const auto sync = std::make_shared<parallel::VirtualRankSync>(
      comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = kElasticRanks, .bucket_bytes = 512});
  TrainerOptions options = TrainerOptions()
                               .epochs(2)
                               .seed(11)
                               .log_every(1)
                               .run_dir(folder)
                               .resume("auto")
                               .save_every_steps(3)
                               .keep(0)
                               .gradient_sync(sync)
                               .session(std::move(session));
  setting.change(options);
  Trainer trainer(options);
  trainer.add_callback(std::make_shared<MetricsCallback>(folder, "elastic"));
  struct Listener : Callback {
    explicit Listener(const ElasticSetting& setting) : hears(setting) {}
    void on_step_end(const StepReport& report) override {
      if (hears.on_step) hears.on_step(report);
    }
    void on_start_counts(const FitInfo& info) override {
      if (hears.on_start) hears.on_start(info);
    }
    const ElasticSetting& hears;
  };
  trainer.add_callback(std::make_shared<Listener>(setting));
  return trainer.fit(task, loader, &eval);
}

struct ElasticEnd {
  std::map<std::string, std::string> files;
  int deaths = 0;
  std::uint64_t generations = 0;
  std::vector<int> points = {};  // of the first processes
};

inline ElasticEnd run_elastic(const ElasticSetting& setting, test::FakeFaults faults,
                              const std::filesystem::path& folder) {
  test::FakeRun run(kElasticRanks, std::move(faults), [&](int, std::shared_ptr<elastic::Session> session) {
    train_elastic(setting, folder, std::move(session));
  });
  run.run(setting.processes);
  ElasticEnd end{test::run_files(folder), run.deaths(), run.generations(), {}};
  for (int id = 0; id < setting.processes; ++id) end.points.push_back(run.points(id));
  return end;
}

inline ElasticEnd run_elastic(const ElasticSetting& setting, test::FakeFaults faults) {
  const test::TempDir dir;
  return run_elastic(setting, std::move(faults), dir.path());
}

/// The results of two processes, and of the successor of the second one, which dies at the point; below 0: it
/// does not. `setting_of`: of a process, by its id. `points`: those that the second one has come to.
inline std::vector<FitResult> results_beside_successor(
    const std::function<ElasticSetting(int id)>& setting_of, int victim_point, int& points) {
  const test::TempDir dir;
  std::mutex mutex;
  std::vector<FitResult> results;
  const auto faults = [&](int id, int point) {
    return id == 1 && point == victim_point ? test::FakeFault::kDie : test::FakeFault::kNone;
  };
  test::FakeRun run(kElasticRanks, faults, [&](int id, std::shared_ptr<elastic::Session> session) {
    const ElasticSetting setting = setting_of(id);
    const FitResult result = train_elastic(setting, dir.path(), std::move(session));
    const std::lock_guard lock(mutex);
    results.push_back(result);
  });
  run.run(2);
  points = run.points(1);
  return results;
}

inline void expect_same_files(const ElasticEnd& found, const ElasticEnd& expected, const std::string& what) {
  SCOPED_TRACE(what);
  for (const auto& [name, content] : expected.files) {
    const auto file = found.files.find(name);
    if (file == found.files.end()) {
      ADD_FAILURE() << name << " is missing";
    } else if (name.ends_with(".safetensors")) {
      EXPECT_TRUE(file->second == content) << name << " differs";
    } else {
      EXPECT_EQ(file->second, content) << name;
    }
  }
  for (const auto& [name, content] : found.files) {
    EXPECT_TRUE(expected.files.contains(name)) << name << " was not expected";
  }
}

inline const ElasticEnd& undisturbed(const std::string& optimizer = "sgd") {
  static std::map<std::string, ElasticEnd> ends;
  if (!ends.contains(optimizer)) ends[optimizer] = run_elastic({.optimizer = optimizer}, {});
  return ends.at(optimizer);
}

}  // namespace cohort::train
