// Classes by name: in checkpoints, in evaluation, in prediction, and when a run resumes.
#include "cohort/train/classes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/dataset.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/predict.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::Logged;
using test::message_contains;
using test::SmallRun;
using test::write_file;

/// Images of one brightness per class, which a perceptron tells apart.
class ClassesTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* split : {"train", "val"}) {
      write_class(split, "ape", 30);
      write_class(split, "bee", 120);
      write_class(split, "cat", 220);
    }
  }

  fs::path data(const std::string& split) const { return run.root() / "data" / split; }
  void write_class(const std::string& split, const std::string& name, int brightness) const {
    data::Image image;
    image.reshape(4, 4, 1);
    for (int i = 0; i < 6; ++i) {
      for (std::size_t k = 0; k < image.pixels.size(); ++k) {
        image.pixels[k] = static_cast<std::uint8_t>(brightness + static_cast<int>(k) % (i + 2));
      }
      const std::vector<std::byte> bytes = data::encode_png(image);
      write_file(data(split) / name / (std::to_string(i) + ".png"),
                 {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
  }
  std::vector<std::string> words(std::vector<std::string> more = {}) const {
    more.insert(more.begin(),
                {"data.type=image_folder", "data.path=" + (run.root() / "data").string(),
                 "model.num_classes=0", "data.mean=[0.5]", "data.std=[0.3]", "data.train_transforms=none",
                 "data.val_transforms=none", "train.epochs=20", "optim.lr=0.1", "optim.momentum=0.9"});
    return more;
  }
  fs::path last() const { return run.path() / "checkpoints" / "last"; }
  double accuracy(const fs::path& checkpoint, std::vector<std::string> more = {}) const {
    return run_evaluation(run.config(words(std::move(more))), checkpoint).at("accuracy");
  }
  /// The name that the model gives to the images of a class of the training data.
  std::string name_of(const std::string& folder) const {
    const Predictor predictor = Predictor::of_run(run.config(words()), last());
    return predictor({(data("train") / folder / "0.png").string()}, 1).at(0).classes.at(0).first;
  }
  /// Takes out of the last checkpoint what older versions did not write.
  void make_old() const {
    const fs::path folder = fs::canonical(last());
    checkpoint::Manifest manifest = checkpoint::read_manifest(folder);
    for (const char* key : {"data", "best_metric", "best_is_highest", "description"})
      manifest.state["run"].erase(key);
    fs::remove(folder / "state.json");
    checkpoint::write_manifest(folder, manifest);
  }

  const SmallRun run;
};

TEST_F(ClassesTest, EvaluationOnSomeOfTheClassesTakesThemByName) {
  run.start(words());
  ASSERT_EQ(accuracy(last()), 1);
  fs::rename(data("val") / "ape", run.root() / "ape");
  EXPECT_EQ(accuracy(last()), 1);
  EXPECT_EQ(accuracy(last(), {"model.num_classes=3"}), 1);
  EXPECT_EQ(accuracy(last() / "model.safetensors"), 1);
}

TEST_F(ClassesTest, EvaluationOnAClassThatWasNotTrainedIsRejectedNamingIt) {
  run.start(words());
  fs::rename(data("val") / "ape", data("val") / "zebra");
  COHORT_EXPECT_THROW_WITH(
      accuracy(last()), DataError,
      "the model was not trained on these classes of the data: zebra; it was trained on: "
      "ape bee cat");
}

TEST_F(ClassesTest, PredictionNamesWhatWasTrainedAndNeedsNoValidationData) {
  run.start(words());
  fs::rename(data("val") / "ape", data("val") / "zebra");
  EXPECT_EQ(name_of("ape"), "ape");
  EXPECT_EQ(name_of("bee"), "bee");
  fs::remove_all(data("val"));
  EXPECT_EQ(name_of("cat"), "cat");
  const fs::path file = run.root() / "a.program";
  export_program(run.config(words()), last(), 1, file);
  const Predictor program = Predictor::of_program(file);
  EXPECT_EQ(program({(data("train") / "bee" / "0.png").string()}, 1).at(0).classes.at(0).first, "bee");
}

TEST_F(ClassesTest, ACheckpointThatNamesNoClassesIsUsedAsBefore) {
  run.start(words());
  make_old();
  EXPECT_FALSE(trained_classes(last()));
  EXPECT_EQ(accuracy(last()), 1);
  for (const char* name : {"ape", "bee", "cat"}) EXPECT_EQ(name_of(name), name);
  EXPECT_TRUE(run.resume(words({"train.epochs=21"})).fit.finished);
  EXPECT_EQ(trained_classes(last()), (std::vector<std::string>{"ape", "bee", "cat"}));
}

/// Data without names of classes.
struct Nameless : data::ExampleDataset {
  std::int64_t size() const override { return 12; }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    return {at::full({1, 4, 4}, static_cast<float>(i)), at::scalar_tensor(i % 3, at::kLong)};
  }
};

TEST_F(ClassesTest, ThatThereAreNoNamesIsKnownToo) {
  data::register_dataset("nameless", [](const data::DatasetArgs& args) {
    static_cast<void>(args.has("path") || args.has("split"));
    return std::make_shared<Nameless>();
  });
  run.start({"data.type=nameless", "model.num_classes=3", "train.eval_every=0", "train.epochs=1"});
  ASSERT_TRUE(trained_classes(last()).has_value());
  EXPECT_TRUE(trained_classes(last())->empty());
  EXPECT_EQ(trained_classes(run.root() / "nowhere.safetensors"), std::nullopt);
}

TEST_F(ClassesTest, ResumingWithOtherClassesOrAnotherNumberOfSamplesIsRejected) {
  run.start(words({"train.max_steps=7"}));
  const auto before = run.files();
  const auto rejected = [&](const std::string& what) {
    COHORT_EXPECT_THROW_WITH(run.resume(words()), DataError, what);
    EXPECT_EQ(run.files(), before);
  };
  const auto rename = [&](const char* from, const char* to) {
    for (const char* split : {"train", "val"}) fs::rename(data(split) / from, data(split) / to);
  };
  rename("ape", "zebra");
  rejected("was trained on other classes; the training data lacks ape; it did not have zebra");
  rename("zebra", "ape");
  fs::remove(data("train") / "bee" / "3.png");
  rejected("was made with 18 training samples, the training data has 17");
  write_class("train", "bee", 120);
  write_class("train", "dog", 1);
  write_class("val", "dog", 1);
  rejected("it did not have dog");
  for (const char* split : {"train", "val"}) fs::remove_all(data(split) / "dog");
  EXPECT_TRUE(run.resume(words()).fit.finished);
}

TEST_F(ClassesTest, ResumingWithOtherFilesIsAWarning) {
  run.start(words({"train.max_steps=7"}));
  const auto log_of = [&](const char* steps) {
    const Logged log;
    run.resume(words({steps}));
    return log.text();
  };
  const std::string message = "there are as many samples, with other names or sizes";
  EXPECT_EQ(log_of("train.max_steps=8").find(message), std::string::npos);
  fs::rename(data("train") / "bee" / "3.png", data("train") / "bee" / "x.png");
  EXPECT_TRUE(message_contains(log_of("train.max_steps=9"), message));
  EXPECT_EQ(log_of("train.max_steps=10").find(message), std::string::npos) << "logged once";
  fs::resize_file(data("train") / "bee" / "x.png", fs::file_size(data("train") / "bee" / "x.png") + 1);
  EXPECT_TRUE(message_contains(log_of("train.max_steps=11"), message));
}

TEST_F(ClassesTest, AFolderWhoseNameIsNoUtf8IsSavedAndReadBack) {
  const std::string latin = "k\xe4se";
  for (const char* split : {"train", "val"}) write_class(split, latin, 80);
  run.start(words({"train.max_steps=7"}));
  EXPECT_EQ(trained_classes(last()), (std::vector<std::string>{"ape", "bee", "cat", latin}));
  EXPECT_TRUE(run.resume(words({"train.max_steps=8"})).fit.finished);
}

/// Files of 4 x 4 images, one for each of `labels`.
void write_idx(const fs::path& folder, const std::string& prefix, const std::string& labels) {
  const std::string count{0, 0, 0, static_cast<char>(labels.size())}, side{0, 0, 0, 4};
  write_file(folder / (prefix + "-images-idx3-ubyte"),
             std::string{0, 0, 8, 3} + count + side + side + std::string(16 * labels.size(), '\x50'));
  write_file(folder / (prefix + "-labels-idx1-ubyte"), std::string{0, 0, 8, 1} + count + labels);
}

TEST(OtherClassesTest, TheAdviceIsAboutTheKindOfDataThatTheRunHas) {
  const SmallRun run;
  write_idx(run.root() / "idx", "train", {0, 1, 2, 3});
  write_idx(run.root() / "idx", "t10k", {0, 1});
  const auto words = [&](const std::string& more) {
    return std::vector<std::string>{"data.type=idx", "data.path=" + (run.root() / "idx").string(),
                                    "model.num_classes=0", "train.epochs=1", more};
  };
  try {
    run.start(words("train.eval_every=1"));
    ADD_FAILURE() << "was not rejected";
  } catch (const DataError& error) {
    EXPECT_TRUE(message_contains(error.what(), "in one only: 2 3. Try: IDX files of one data set"));
    EXPECT_FALSE(message_contains(error.what(), "folder"));
  }
  // What the advice says works.
  run.start(words("train.eval_every=0"));
  EXPECT_EQ(run_evaluation(run.config(words("train.eval_every=1")), run.path() / "checkpoints" / "last")
                .count("accuracy"),
            1U);
}

TEST_F(ClassesTest, OtherClassFoldersInValidationAreRejectedWithAdviceAboutFolders) {
  fs::rename(data("val") / "cat", data("val") / "cow");
  COHORT_EXPECT_THROW_WITH(run.start(words()), DataError,
                           "in one only: cat cow. Try: the same class folders in both");
}

}  // namespace
}  // namespace cohort::train
