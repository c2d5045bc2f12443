// `cohort predict` and `cohort export`.
#include <gtest/gtest.h>

#include <fstream>

#include "cohort/base/error.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/models/registry.h"
#include "tests/cli/command.h"
#include "tests/cli/program.h"
#include "tests/support/throws.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;
using test::TempDir;
using test::write_file;

std::string predict(const std::vector<std::string>& words) {
  return test::run_command(add_predict, "predict", words);
}
std::string exported(const std::vector<std::string>& words) {
  return test::run_command(add_export, "export", words);
}

// A model with initial values, a configuration, and images of two classes in a folder each.
class PredictCommandTest : public testing::Test {
 protected:
  // Returns the words that name model and configuration.
  std::vector<std::string> make(const std::string& yaml, models::ModelOptions options) {
    write_images();
    const std::string config = dir / "run.yaml", weights = dir / "model.safetensors";
    write_file(config, yaml + "\ndata: {path: " + (dir / "data").string() +
                           ", image_size: " + std::to_string(options.image_size) +
                           (options.in_channels == 1 ? ", color: gray}"
                                                     : ", mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.4]}"));
    options.num_classes = 2;
    at::manual_seed(4);
    checkpoint::save_safetensors(weights, checkpoint::module_state(*models::make_model(options).ptr()));
    return {"--config", config, "--checkpoint", weights};
  }

  void write_images() {
    data::Image image;
    image.reshape(40, 50, 3);
    for (int i = 0; i < 5; ++i) {
      for (std::size_t k = 0; k < image.pixels.size(); ++k) {
        image.pixels[k] = static_cast<std::uint8_t>(k * static_cast<std::size_t>(i + 3) / 7);
      }
      const std::vector<std::byte> bytes = data::encode_jpeg(image, 95);
      const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      images.push_back(dir / (std::to_string(i) + ".jpg"));
      write_file(images.back(), text);
      for (const char* name : {"cat", "dog"}) write_file(dir / "data" / "val" / name / "0.jpg", text);
    }
  }

  // The program of a file says what the model says of each image, in a process without either.
  void expect_same(std::vector<std::string> model) {
    const std::string file = dir / "a.program";
    std::vector<std::string> words = model;
    words.push_back(file);
    exported(words);
    words = model;
    words.insert(words.end(), images.begin(), images.end());
    const std::string expected = predict(words);
    EXPECT_NE(expected.find("0.jpg\t"), std::string::npos) << expected;
    EXPECT_NE(expected.find("cat 0."), std::string::npos) << expected;
    fs::remove_all(dir / "data");
    fs::remove(dir / "model.safetensors");
    words = {"predict", "--program", file};
    words.insert(words.end(), images.begin(), images.end());
    const test::Outcome outcome = test::run_program(dir.path(), words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, expected);
  }

  const TempDir dir;
  std::vector<std::string> images;
};

TEST_F(PredictCommandTest, AProgramSaysWhatTheModelSaysOfLeNet) {
  models::ModelOptions options;
  options.name = "lenet5";
  options.in_channels = 1;
  options.image_size = 28;
  expect_same(make("model: {name: lenet5}", options));
}

TEST_F(PredictCommandTest, AProgramSaysWhatTheModelSaysOfResNetInBfloat16AndChannelsLast) {
  models::ModelOptions options;
  options.name = "resnet18";
  options.image_size = 32;
  options.width = 0.125;
  expect_same(
      make("model: {name: resnet18, width: 0.125}\ntrain: {memory_format: channels_last, precision: bf16}",
           options));
}

TEST_F(PredictCommandTest, ALastBatchIsFilledUp) {
  models::ModelOptions options;
  options.name = "lenet5";
  options.in_channels = 1;
  options.image_size = 28;
  std::vector<std::string> words = make("model: {name: lenet5}", options);
  const std::string file = dir / "b.program";
  words.insert(words.end(), {"--batch-size", "3", file});
  EXPECT_NE(exported(words).find("for 3 images at a time"), std::string::npos);
  words = {"--program", file, "--top", "1"};
  words.insert(words.end(), images.begin(), images.end());
  const std::string all = predict(words);
  EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 5);
  for (const std::string& image : images) {
    const std::string line = predict({"--program", file, "--top", "1", image});
    EXPECT_NE(all.find(line), std::string::npos) << line << "not in\n" << all;
  }
}

TEST_F(PredictCommandTest, SaysWhatIsMissing) {
  models::ModelOptions options;
  options.name = "lenet5";
  options.in_channels = 1;
  options.image_size = 28;
  const std::vector<std::string> model = make("model: {name: lenet5}", options);
  const std::string file = dir / "c.program";
  std::vector<std::string> words = model;
  words.push_back(file);
  exported(words);
  COHORT_EXPECT_THROW_WITH(predict({images[0]}), UsageError, "neither --run nor --config was given");
  COHORT_EXPECT_THROW_WITH(predict({"--program", file, "nowhere.jpg"}), DataError, "nowhere.jpg");
  COHORT_EXPECT_THROW_WITH(predict({"--program", file, file}), DataError, "c.program");
  COHORT_EXPECT_THROW_WITH(predict({"--program", images[0], images[0]}), DataError, "0.jpg");
  COHORT_EXPECT_THROW_WITH(predict({"--program", file, "--top", "0", images[0]}), UsageError, "top: got 0");
  COHORT_EXPECT_THROW_WITH(predict({"--program", dir / "model.safetensors", images[0]}), DataError,
                           "is no program of script mode");
  EXPECT_THROW(predict({"--program", file, "--run", "runs/x", images[0]}), CLI::Error);
  words = model;
  words.insert(words.end(), {"--batch-size", "0", file});
  COHORT_EXPECT_THROW_WITH(exported(words), UsageError, "batch_size: got 0");
}

}  // namespace
}  // namespace cohort::cli
