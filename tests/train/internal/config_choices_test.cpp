// Settings whose values are words, in a configuration that a program made and that nobody checked.
#include "cohort/train/internal/config_choices.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/config/config.h"
#include "cohort/config/keys.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/train/internal/factories.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

void read_folder(const config::Config& config) {
  make_dataset(config.data, Split::kTrain, {.num_classes = 0, .seed = 1});
}

void read_batches(const config::Config& config) {
  const auto dataset = make_dataset(config.data, Split::kTrain, {.num_classes = 0, .seed = 1});
  make_loader(config.data, Split::kTrain, dataset, {.plan = batch_plan({}, {}, {}, 1)});
}

struct KeyUse {
  const char* key;
  std::function<void(const config::Config&)> use;  // the part of the library that reads the key
};

const std::vector<KeyUse>& key_uses() {
  static const std::vector<KeyUse> uses = {
      {"data.color", read_folder},
      {"data.color", [](const config::Config& c) { image_field(c.data, false); }},
      {"data.empty_class", read_folder},
      {"data.on_other_files", read_folder},
      {"data.cache", read_folder},
      {"data.last_batch", read_batches},
      {"data.on_error", read_batches},
      {"data.on_error", [](const config::Config& c) { batch_plan(c.train, c.distributed, c.data, 1); }},
      {"train.precision", [](const config::Config& c) { classification_options(c.train, 0, {}); }},
      {"train.memory_format", [](const config::Config& c) { dataset_setup(c.model, c.train, 1); }},
      {"train.on_nonfinite", [](const config::Config& c) { stops_on_nonfinite(c.train); }},
      {"schedule.unit", [](const config::Config& c) { make_schedule(c.schedule, c.train, 0.1, 1); }},
      {"schedule.anneal", [](const config::Config& c) { make_schedule(c.schedule, c.train, 0.1, 1); }},
  };
  return uses;
}

// A configuration whose training data is one image.
config::Config one_image(const test::TempDir& dir) {
  data::Image image;
  image.reshape(4, 4, 3);
  const std::vector<std::byte> file = data::encode_png(image);
  test::write_file(dir / "train/a/1.png", {reinterpret_cast<const char*>(file.data()), file.size()});
  config::Config config;
  config.data.path = dir.path().string();
  config.data.workers = 0;
  return config;
}

TEST(ConfigChoicesTest, AnUnknownWordIsAConfigErrorThatListsTheWordsOfTheKey) {
  const test::TempDir dir;
  for (const KeyUse& each : key_uses()) {
    SCOPED_TRACE(each.key);
    config::Config config = one_image(dir);
    const config::ConfigKey* const key = config::find_key(each.key);
    ASSERT_NE(key, nullptr);
    base::TextList words;
    for (const std::string& word : key->choices) words.add(word);
    for (const char* unknown : {"wrong", ""}) {
      *std::get<std::string*>(key->target(config)) = unknown;
      COHORT_EXPECT_THROW_WITH(
          each.use(config), ConfigError,
          base::concat(each.key, ": got '", unknown, "', expected one of ", words.text()));
    }
  }
}

TEST(ConfigChoicesTest, EachWordThatTheTableOfKeysHasIsTaken) {
  const test::TempDir dir;
  for (const KeyUse& each : key_uses()) {
    config::Config config = one_image(dir);
    const config::ConfigKey* const key = config::find_key(each.key);
    ASSERT_NE(key, nullptr) << each.key;
    ASSERT_GE(key->choices.size(), 2U) << each.key;
    for (const std::string& word : key->choices) {
      *std::get<std::string*>(key->target(config)) = word;
      EXPECT_NO_THROW(each.use(config)) << each.key << " " << word;
    }
  }
}

TEST(ConfigChoicesTest, WordsStandForTheirTypes) {
  config::DataConfig data;
  EXPECT_EQ(color_of(data), data::ColorMode::kRgb);
  EXPECT_EQ(last_batch_of(data), data::LastBatchPolicy::kKeep);
  EXPECT_EQ(on_error_of(data), data::OnError::kRaise);
  EXPECT_EQ(on_other_files_of(data), data::OnOtherFiles::kWarn);
  EXPECT_FALSE(keeps_empty_classes(data));
  EXPECT_FALSE(caches_files(data));
  data = {.color = "gray",
          .last_batch = "pad",
          .on_error = "skip",
          .empty_class = "keep",
          .on_other_files = "raise",
          .cache = "encoded"};
  EXPECT_EQ(color_of(data), data::ColorMode::kGray);
  EXPECT_EQ(last_batch_of(data), data::LastBatchPolicy::kPad);
  EXPECT_EQ(on_error_of(data), data::OnError::kSkip);
  EXPECT_EQ(on_other_files_of(data), data::OnOtherFiles::kRaise);
  EXPECT_TRUE(keeps_empty_classes(data));
  EXPECT_TRUE(caches_files(data));
  EXPECT_FALSE(is_bf16({}));
  EXPECT_TRUE(is_bf16({.precision = "bf16"}));
  EXPECT_TRUE(is_channels_last({}));
  EXPECT_FALSE(is_channels_last({.memory_format = "contiguous"}));
  EXPECT_TRUE(stops_on_nonfinite({}));
  EXPECT_FALSE(stops_on_nonfinite({.on_nonfinite = "continue"}));
  EXPECT_TRUE(counts_epochs({}));
  EXPECT_FALSE(counts_epochs({.unit = "step"}));
  EXPECT_FALSE(anneals_linearly({}));
  EXPECT_TRUE(anneals_linearly({.anneal = "linear"}));
}

}  // namespace
}  // namespace cohort::train
