// A data set that a library registered: it says shapes and makes inputs itself, and the run asks it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/data/dataset.h"
#include "cohort/script/script.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/predict.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;

/// Samples [2, 3, 3] of three classes: no image has two channels.
class Tiles : public data::ExampleDataset {
 public:
  std::int64_t size() const override { return 12; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
    at::Tensor tile = at::full({2, 3, 3}, -1.0F);
    tile.select(1, index % 3).fill_(1 + 0.01 * static_cast<double>(index));
    return {tile, at::scalar_tensor(index % 3, at::kLong)};
  }
  std::vector<std::string> classes() const override { return {"top", "middle", "bottom"}; }
  std::string describe(std::int64_t index) const override { return base::concat("tile-", index); }
};
COHORT_REGISTER_DATASET(tiles, [](const data::DatasetArgs&) { return std::make_shared<const Tiles>(); });

class RegisteredDataTest : public ::testing::Test {
 protected:
  config::Config config(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"data.type=tiles", "data.mean=[]", "data.std=[]", "data.image_size=224",
                               "data.color=rgb", "model.num_classes=0", "optim.lr=0.5", "train.epochs=8"});
    return run.config(more);
  }
  at::Tensor probabilities(const fs::path& checkpoint, std::int64_t index) const {
    config::ModelConfig with_weights = config().model;
    with_weights.weights = checkpoint.string();
    const Tiles tiles;
    base::RandomStream random(0, 0, 0, base::Purpose::kTransform);
    torch::nn::AnyModule model =
        make_model(with_weights, {.input = tiles.fields().at(0), .num_classes = 3, .channels_last = false});
    model.ptr()->eval();
    return model.forward<at::Tensor>(tiles.get(index, random)[0].unsqueeze(0)).softmax(1)[0];
  }

  test::SmallRun run;
};

TEST_F(RegisteredDataTest, TheModelGetsChannelsAndSizeFromTheDataSet) {
  const RunResult trained = run_training(config(), "test");
  EXPECT_EQ(trained.fit.metrics.at("val_accuracy"), 1);
}

TEST_F(RegisteredDataTest, LayersAreMeasuredOnInputsOfTheDataSet) {
  // Measured on an image, the first layer would reject it.
  const RunResult trained =
      run_training(config({"distributed.model=pipeline", "distributed.devices=cpu:0/a cpu:0/b",
                           "distributed.micro_batches=2"}),
                   "test");
  EXPECT_EQ(trained.fit.metrics.at("val_accuracy"), 1);
}

TEST_F(RegisteredDataTest, PredictionOfSamplesIsTheModelOnWhatTheDataSetMakes) {
  run_training(config(), "test");
  const fs::path checkpoint = run.path() / "checkpoints" / "best";
  const std::vector<Prediction> found = predict_samples(config(), checkpoint, {11, 0, 4, 0, 7}, 3);
  ASSERT_EQ(found.size(), 5);
  const std::vector<std::int64_t> samples = {11, 0, 4, 0, 7};
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(found[i].path, base::concat("tile-", samples[i]));
    ASSERT_EQ(found[i].classes.size(), 3);
    EXPECT_EQ(found[i].classes[0].first, Tiles().classes()[static_cast<std::size_t>(samples[i] % 3)]);
    EXPECT_NEAR(found[i].classes[0].second, probabilities(checkpoint, samples[i]).max().item<double>(), 1e-6);
  }
  EXPECT_EQ(predict_samples(config(), checkpoint, {3}, 1)[0].classes.size(), 1);
  COHORT_EXPECT_THROW_WITH(predict_samples(config(), checkpoint, {0, 12}, 1), UsageError,
                           "samples: got 12, the validation data has 12 samples: 0 to 11");
  COHORT_EXPECT_THROW_WITH(predict_samples(config(), checkpoint, {-1}, 1), UsageError, "samples: got -1");
}

TEST_F(RegisteredDataTest, ImagesOfItAreRejectedByName) {
  run_training(config(), "test");
  COHORT_EXPECT_THROW_WITH(Predictor::of_run(config(), run.path() / "checkpoints" / "best"), UsageError,
                           "data.type is tiles, which a library registered");
}

TEST_F(RegisteredDataTest, AnExportedProgramTakesInputsOfTheDataSet) {
  run_training(config(), "test");
  const fs::path checkpoint = run.path() / "checkpoints" / "best", file = run.root() / "tiles.program";
  export_program(config(), checkpoint, 1, file);
  const script::LoadedProgram program = script::load(file);
  const Tiles tiles;
  base::RandomStream random(0, 0, 0, base::Purpose::kTransform);
  for (const std::int64_t index : {0, 5}) {
    const at::Tensor logits = program(tiles.get(index, random)[0].unsqueeze(0)).front();
    EXPECT_TRUE(at::equal(logits.softmax(1)[0], probabilities(checkpoint, index)));
  }
  EXPECT_EQ(program.metadata().at("classes"), R"(["top","middle","bottom"])");
  COHORT_EXPECT_THROW_WITH(Predictor::of_program(file), DataError, "does not say how an image");
}

TEST_F(RegisteredDataTest, KeysForImagesAreWarnedOf) {
  const config::Config warned =
      config({"data.train_transforms=flip", "data.val_transforms=resize", "data.mean=[0.5]", "data.std=[0.2]",
              "data.image_size=32", "data.color=gray", "data.empty_class=keep", "data.cache=encoded"});
  std::string all;
  for (const std::string& warning : warned.warnings) all += warning + "\n";
  for (const char* key :
       {"train_transforms", "val_transforms", "mean", "std", "image_size", "color", "empty_class", "cache"}) {
    EXPECT_NE(all.find(base::concat("data.", key, " has no effect with data.type tiles")), std::string::npos)
        << key << " in\n"
        << all;
  }
}

}  // namespace
}  // namespace cohort::train
