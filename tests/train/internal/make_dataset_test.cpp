// How the configuration's keys reach the data sets.
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/train/internal/factories.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

constexpr DatasetSetup kSetup{.num_classes = 0, .seed = 1};

void write_png(const std::filesystem::path& path) {
  data::Image image;
  image.reshape(4, 4, 3);
  const std::vector<std::byte> file = data::encode_png(image);
  test::write_file(path, {reinterpret_cast<const char*>(file.data()), file.size()});
}

TEST(MakeDatasetTest, OtherFilesAreRejectedWhereTheConfigurationSaysSo) {
  const test::TempDir dir;
  write_png(dir / "train/a/1.png");
  test::write_file(dir / "train/a/2.webp", "");
  config::DataConfig config;
  config.path = dir.path().string();
  EXPECT_EQ(make_dataset(config, Split::kTrain, kSetup)->size(), 1);
  config.on_other_files = "raise";
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kTrain, kSetup), DataError,
                           "1 .webp (such as a/2.webp)");
}

TEST(MakeDatasetTest, DataThatIsNotThereIsNamedWithTheKeysThatSayWhereItIs) {
  const test::TempDir dir;
  config::DataConfig config;
  config.path = (dir / "photos").string();
  COHORT_EXPECT_THROW_WITH(
      make_dataset(config, Split::kTrain, kSetup), DataError,
      base::concat("there is no training data: the folder ", config.path,
                   "/train does not exist. Try: data.path=FOLDER, or data.train=FOLDER"));
  write_png(dir / "photos/train/a/1.png");
  const std::string way_out = "Try: data.val=FOLDER, or train.eval_every=0, which trains without validation";
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kVal, kSetup), DataError,
                           base::concat("the folder ", config.path, "/val does not exist. ", way_out));
  config.type = "idx";
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kVal, kSetup), DataError,
                           base::concat("has no t10k-images-idx3-ubyte, plain or .gz. ", way_out));
  config.val = (dir / "elsewhere").string();
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kVal, kSetup), DataError,
                           base::concat("elsewhere does not exist. ", way_out));
}

TEST(MakeDatasetTest, TheDataSetsThatKeysDescribeAreThoseThatAreCohortsOwn) {
  std::vector<std::string> own;
  for (const std::string& name : data::dataset_names()) {
    if (data::is_own_dataset(name)) own.push_back(name);
  }
  EXPECT_FALSE(own.empty());
  EXPECT_EQ(own_dataset_names(), own);
}

TEST(MakeDatasetTest, OptionsGoToTheRegisteredDataSetThatReadsThem) {
  data::register_dataset("rows", [](const data::DatasetArgs& args) {
    EXPECT_EQ(args.at("path"), args.at("split") == "train" ? "here/train" : "there");
    return std::make_shared<data::TensorDataset>(
        std::vector<at::Tensor>{at::zeros({args.integer("rows", 2), 3})});
  });
  config::DataConfig config;
  config.type = "rows";
  config.path = "here";
  config.val = "there";
  config.options = {{"rows", "5"}};
  EXPECT_EQ(make_dataset(config, Split::kTrain, kSetup)->size(), 5);
  EXPECT_EQ(make_dataset(config, Split::kVal, kSetup)->size(), 5);
  config.options = {{"rwos", "5"}};
  COHORT_EXPECT_THROW_WITH(
      make_dataset(config, Split::kTrain, kSetup), ConfigError,
      "data set 'rows' (split train) has no option rwos. Try: rows; its options are rows");
  config.options = {{"rows", "-1"}};
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kVal, kSetup), DataError,
                           "while making data set 'rows' (split val): ");
  config.options = {{"path", "elsewhere"}};
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kTrain, kSetup), ConfigError,
                           "data.options.path is set, but that is given by the run");
}

TEST(MakeDatasetTest, OptionsOfOursAreRejected) {
  for (const char* kind : {"synthetic", "image_folder", "idx"}) {
    config::DataConfig config;
    config.type = kind;
    config.options = {{"size", "5"}};
    COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kTrain, kSetup), ConfigError,
                             base::concat("data.options.size is set, but data.type is ", kind));
  }
}

}  // namespace
}  // namespace cohort::train
