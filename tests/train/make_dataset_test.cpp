// How the configuration's keys reach the data sets.
#include <gtest/gtest.h>

#include "cohort/core/error.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/train/build.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

void write_png(const std::filesystem::path& path) {
  data::Image image;
  image.reshape(4, 4, 3);
  const std::vector<std::byte> file = data::encode_png(image);
  test::write_file(path, {reinterpret_cast<const char*>(file.data()), file.size()});
}

TEST(MakeDatasetTest, OtherFilesAreRefusedWhereTheConfigurationSaysSo) {
  const test::TempDir dir;
  write_png(dir / "train/a/1.png");
  test::write_file(dir / "train/a/2.webp", "");
  Config config;
  config.data.path = dir.path().string();
  EXPECT_EQ(make_dataset(config, Split::kTrain)->size(), 1);
  config.data.on_other_files = "refuse";
  COHORT_EXPECT_THROW_WITH(make_dataset(config, Split::kTrain), DataError, "1 .webp (such as a/2.webp)");
}

}  // namespace
}  // namespace cohort::train
