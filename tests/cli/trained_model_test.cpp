// Which configuration the commands take that use a trained model.
#include "cohort/cli/internal/trained_model.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/dataset.h"
#include "cohort/train/predict.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace {

std::function<void()> at_unmapping;  // called once, when a file that was read is unmapped for the n-th time
int files_left = 0;

}  // namespace

// In place of the C library's.
extern "C" int munmap(void* address, size_t size) noexcept {
  if (at_unmapping && --files_left == 0) std::exchange(at_unmapping, nullptr)();
  return static_cast<int>(::syscall(SYS_munmap, address, size));
}

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;
using test::Logged;
using test::message_contains;
using test::read_file;
using test::SmallRun;
using test::write_file;

std::vector<std::string> slow_classes = {"ape", "bee", "cat"};
fs::path doomed;  // what the next data set that is made removes

/// Three samples [1, 4, 4]. A run that saves removes the checkpoint while the data is looked at.
class Slow : public data::ExampleDataset {
 public:
  Slow() {
    if (!doomed.empty()) fs::remove_all(doomed);
  }
  std::int64_t size() const override { return 3; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
    return {at::full({1, 4, 4}, static_cast<double>(index)), at::scalar_tensor(index, at::kLong)};
  }
  std::vector<std::string> classes() const override { return slow_classes; }
};
COHORT_REGISTER_DATASET(slow, [](const data::DatasetArgs&) { return std::make_shared<const Slow>(); });

/// A perceptron on images of three classes.
class TrainedModelTest : public testing::Test {
 protected:
  void SetUp() override {
    data::Image image;
    image.reshape(4, 4, 1);
    for (const std::string split : {"train", "val", "val2"}) {
      for (const std::string name : {"ape", "bee", "cat"}) {
        for (int i = 0; i < 4; ++i) {
          for (std::size_t k = 0; k < image.pixels.size(); ++k) {
            const std::size_t value =
                70 * static_cast<std::size_t>(name[0] - 'a' + 1) + k * (split.size() + i);
            image.pixels[k] = static_cast<std::uint8_t>(value);
          }
          const std::vector<std::byte> bytes = data::encode_png(image);
          write_file(data() / split / name / (std::to_string(i) + ".png"),
                     {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
        }
      }
    }
  }

  fs::path data() const { return run.root() / "data"; }
  std::vector<std::string> words(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"data.type=image_folder", "data.path=" + data().string(),
                               "model.num_classes=0", "data.mean=[0.5]", "data.std=[0.3]",
                               "data.train_transforms=none", "data.val_transforms=none", "run.keep=0"});
    return more;
  }
  static TrainedModel model_of(const std::string& folder, const std::string& checkpoint,
                               const std::vector<std::string>& overrides = {}) {
    TrainedModel model;
    model.run = folder;
    model.checkpoint = checkpoint;
    model.overrides = overrides;
    return model;
  }
  static std::map<std::string, double> evaluate(const std::string& folder, const std::string& checkpoint,
                                                const std::vector<std::string>& overrides = {}) {
    TrainedModel model = model_of(folder, checkpoint, overrides);
    const config::Config config = model.load("cli.eval");
    return train::run_evaluation(config, model.checkpoint);
  }
  fs::path checkpoint(const std::string& name) const { return run.path() / "checkpoints" / name; }
  /// val_loss of each epoch.
  std::vector<double> losses() const {
    std::istringstream rows(read_file(run.path() / "metrics.jsonl"));
    std::vector<double> losses;
    for (std::string row; std::getline(rows, row);) {
      const auto entry = nlohmann::json::parse(row);
      if (entry.at("type") == "epoch") losses.push_back(entry.at("val_loss"));
    }
    return losses;
  }
  void expect_evaluated_as_in_training() const {
    const std::vector<double> expected = losses();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::string name = "epoch_000" + std::to_string(i + 1);
      EXPECT_NEAR(evaluate(run.path(), checkpoint(name)).at("loss"), expected[i], 1e-5) << name;
    }
  }

  const SmallRun run;
};

TEST_F(TrainedModelTest, EveryCheckpointIsEvaluatedWithTheConfigurationThatMadeIt) {
  run.start(words({"train.epochs=2"}));
  int epochs = 2;
  const std::vector<std::string> settings = {"data.mean=[-1.5]",
                                             "data.std=[0.05]",
                                             "data.val_transforms=[{RandomHorizontalFlip: {p: 1}}]",
                                             "train.precision=bf16",
                                             "train.max_eval_steps=1",
                                             "train.label_smoothing=0.3",
                                             "data.val=" + (data() / "val2").string()};
  for (const std::string& setting : settings) {
    SCOPED_TRACE(setting);
    run.start(words({"train.epochs=" + std::to_string(++epochs), "run.resume=auto", setting}));
    expect_evaluated_as_in_training();
  }
}

TEST_F(TrainedModelTest, PredictionAndExportTakeTheImagesAsTheCheckpointDid) {
  run.start(words({"train.epochs=2"}));
  const std::vector<std::string> images = {(data() / "val" / "cat" / "0.png").string()};
  const auto predicted = [&] {
    TrainedModel model = model_of(run.path(), checkpoint("epoch_0002"));
    const config::Config config = model.load("cli.predict");
    return train::Predictor::of_run(config, model.checkpoint)(images, 3).at(0).classes;
  };
  const auto before = predicted();
  run.start(words({"train.epochs=3", "run.resume=auto", "data.mean=[-1.5]"}));
  EXPECT_EQ(predicted(), before);
  TrainedModel model = model_of(run.path(), checkpoint("epoch_0002"));
  const fs::path file = run.root() / "a.program";
  train::export_program(model.load("cli.export"), model.checkpoint, 1, file);
  const auto of_program = train::Predictor::of_program(file)(images, 3).at(0).classes;
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(of_program[i].first, before[i].first);
    EXPECT_NEAR(of_program[i].second, before[i].second, 1e-6);
  }
}

TEST_F(TrainedModelTest, OverridesAndAnotherConfigurationStillCountAndWhatDiffersIsSaid) {
  run.start(words({"train.epochs=1"}));
  const double loss = losses().at(0);
  EXPECT_GT(std::abs(evaluate(run.path(), "last", {"data.mean=[-1.5]"}).at("loss") - loss), 1e-3);
  write_file(run.root() / "mine.yaml", read_file(run.path() / "config.yaml"));
  const auto log_of = [&](const std::vector<std::string>& overrides) {
    TrainedModel model = model_of(run.path(), "last", overrides);
    model.config = run.root() / "mine.yaml";
    const Logged log;
    EXPECT_EQ(model.load("cli.eval").data.mean.size(), 1u);
    return log.text();
  };
  EXPECT_EQ(log_of({"data.workers=1", "run.name=x", "data.path=elsewhere"}), "");
  EXPECT_TRUE(message_contains(log_of({"data.mean=[-1.5]", "data.val_transforms=resize"}),
                               "was made with other settings: data.val_transforms none -> resize, "
                               "data.mean [0.5] -> [-1.5]"));
}

TEST_F(TrainedModelTest, ACheckpointMayBeRemovedOnceItsParametersWereRead) {
  const fs::path kept = run.root() / "kept", program = run.root() / "slow.program";
  run.start({"data.type=slow", "data.mean=[]", "data.std=[]", "model.num_classes=0", "train.epochs=1"});
  fs::copy(fs::canonical(checkpoint("last")), kept, fs::copy_options::recursive);
  const std::vector<std::function<void()>> uses = {
      [&] { EXPECT_GT(evaluate(run.path(), "last").at("loss"), 0); },
      [&] {
        TrainedModel model = model_of(run.path(), "last");
        const config::Config config = model.load("cli.predict");
        EXPECT_EQ(train::predict_samples(config, model.checkpoint, {2}, 1).size(), 1u);
      },
      [&] {
        TrainedModel model = model_of(run.path(), "last");
        const config::Config config = model.load("cli.export");
        train::export_program(config, model.checkpoint, 1, program);
      }};
  for (const auto& use : uses) {
    doomed = fs::canonical(checkpoint("last"));
    EXPECT_NO_THROW(use());
    ASSERT_FALSE(fs::exists(doomed));
    fs::copy(kept, std::exchange(doomed, fs::path()), fs::copy_options::recursive);
  }
  EXPECT_TRUE(fs::exists(program));
}

TEST_F(TrainedModelTest, ACheckpointThatIsRemovedBeforeItIsReadIsFoundAgain) {
  run.start(words({"train.epochs=1"}));
  TrainedModel model = model_of(run.path(), "last");
  files_left = 1;
  at_unmapping = [&] {  // its configuration was read
    run.start(words({"train.epochs=2", "run.resume=auto", "run.keep=1"}));
    fs::remove_all(checkpoint("epoch_0001"));  // may be the best
  };
  double loss = 0;
  model.use("cli.eval", [&](const config::Config& config, const train::TrainedWeights& trained) {
    loss = train::run_evaluation(config, trained).at("loss");
  });
  EXPECT_FALSE(at_unmapping);
  EXPECT_NEAR(loss, losses().at(1), 1e-5);
  model = model_of(run.path(), checkpoint("epoch_0001"));  // by its path it is gone
  EXPECT_THROW(model.use("cli.eval", [](const auto&, const auto&) {}), DataError);
}

TEST_F(TrainedModelTest, WhatFailsOnceTheCheckpointWasReadIsNotTriedAgain) {
  run.start(words({"train.epochs=1"}));
  TrainedModel model = model_of(run.path(), "last");
  int calls = 0;
  const auto work = [&](const config::Config&, const train::TrainedWeights&) {
    ++calls;
    fs::remove_all(checkpoint("epoch_0001"));
    throw DataError("test", "an image is broken");
  };
  COHORT_EXPECT_THROW_WITH(model.use("cli.eval", work), DataError, "an image is broken");
  EXPECT_EQ(calls, 1);
}

TEST_F(TrainedModelTest, ACheckpointThatIsRemovedInBetweenKeepsItsClassesOrIsMissed) {
  const fs::path kept = run.root() / "kept";
  run.start({"data.type=slow", "data.mean=[]", "data.std=[]", "model.num_classes=0", "train.epochs=1"});
  const fs::path last = fs::canonical(checkpoint("last"));
  fs::copy(last, kept, fs::copy_options::recursive);
  TrainedModel model = model_of(run.path(), last);
  const config::Config config = model.load("cli.eval");
  slow_classes = {"cat", "ape", "bee"};  // in the order of another folder
  const auto predict = [&] { return train::predict_samples(config, last, {2}, 3).at(0).classes; };
  const double loss = train::run_evaluation(config, last).at("loss");
  const auto predicted = predict();
  const std::vector<std::function<void()>> uses = {
      [&] { EXPECT_DOUBLE_EQ(train::run_evaluation(config, last).at("loss"), loss); },
      [&] { EXPECT_EQ(predict(), predicted); }};
  for (const auto& use : uses) {
    int missed = 0;
    for (int i = 1; i <= 8; ++i) {  // more than it reads
      SCOPED_TRACE(i);
      files_left = i;
      at_unmapping = [&] { fs::remove_all(last); };
      try {
        use();
      } catch (const DataError&) {
        ++missed;
      }
      at_unmapping = nullptr;
      fs::remove_all(last);
      fs::copy(kept, last, fs::copy_options::recursive);
    }
    EXPECT_GT(missed, 0);
    EXPECT_LT(missed, 8);
  }
  slow_classes = {"ape", "bee", "cat"};
}

TEST_F(TrainedModelTest, ACheckpointWithoutAConfigurationTakesTheRunsFile) {
  run.start(words({"train.epochs=1"}));
  const fs::path folder = fs::canonical(checkpoint("last"));
  checkpoint::Manifest manifest = checkpoint::read_manifest(folder);
  manifest.state["run"].erase("description");
  fs::remove(folder / "state.json");
  checkpoint::write_manifest(folder, manifest);
  EXPECT_NEAR(evaluate(run.path(), "last").at("loss"), losses().at(0), 1e-5);
}

TEST_F(TrainedModelTest, TheWeightsThatARunBeganWithAreNotNeeded) {
  const SmallRun first;
  first.start(words({"train.epochs=1"}));
  const fs::path weights = run.root() / "w.safetensors";
  fs::copy_file(first.path() / "checkpoints" / "last" / "model.safetensors", weights);
  run.start(words({"train.epochs=1", "model.weights=" + weights.string()}));
  fs::remove(weights);
  EXPECT_NEAR(evaluate(run.path(), "last").at("loss"), losses().at(0), 1e-5);
}

TEST_F(TrainedModelTest, AFileAloneMayLieAnywhere) {
  run.start(words({"train.epochs=1"}));
  const fs::path before = fs::current_path();
  fs::current_path(fs::canonical(checkpoint("last")));
  EXPECT_NEAR(evaluate(run.path(), "model.safetensors").at("loss"), losses().at(0), 1e-5);
  fs::current_path(before);
  // Other programs write files of this name.
  const fs::path alone = run.root() / "alone" / "model.safetensors";
  write_file(alone.parent_path() / "state.json", "{\"global_step\": 7}");
  fs::copy_file(checkpoint("last") / "model.safetensors", alone);
  EXPECT_NEAR(evaluate(run.path(), alone).at("loss"), losses().at(0), 1e-5);
  // Ours, damaged, is an error.
  std::string state = read_file(checkpoint("last") / "state.json");
  state[state.size() / 2] ^= 1;
  write_file(alone.parent_path() / "state.json", state);
  EXPECT_THROW(evaluate(run.path(), alone), DataError);
}

}  // namespace
}  // namespace cohort::cli
