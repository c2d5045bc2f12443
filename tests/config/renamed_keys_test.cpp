#include "cohort/config/renamed_keys.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cohort/base/error.h"
#include "cohort/config/config.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::config {
namespace {

// Every key that has another name today, each with another value than its default.
constexpr const char* kEarlier = R"(
data: {kind: idx, color: grey, uneven: pad, on_error: refuse, empty_class: refuse, on_other_files: refuse}
train: {nan: continue}
distributed: {strategy: pipeline, placements: "cpu:0,cpu:1", place: {features: cpu:0}, micro_batches: 7}
comm: {check: off}
run: {images: 3}
)";

void expect_todays(const Config& config) {
  EXPECT_EQ(config.data.type, "idx");
  EXPECT_EQ(config.data.color, "gray");
  EXPECT_EQ(config.data.last_batch, "pad");
  EXPECT_EQ(config.data.on_error, "raise");
  EXPECT_EQ(config.data.empty_class, "raise");
  EXPECT_EQ(config.data.on_other_files, "raise");
  EXPECT_EQ(config.train.on_nonfinite, "continue");
  EXPECT_EQ(config.distributed.model, "pipeline");
  EXPECT_EQ(config.distributed.gradients, "auto");
  EXPECT_EQ(config.distributed.devices, "cpu:0,cpu:1");
  EXPECT_EQ(config.distributed.device_map, (std::map<std::string, std::string>{{"features", "cpu:0"}}));
  EXPECT_EQ(config.distributed.micro_batches, 7);
  EXPECT_EQ(config.comm.check_consistency, "off");
  EXPECT_EQ(config.run.log_images, 3);
}

TEST(RenamedKeysTest, WhatCohortWroteIsTranslated) {
  expect_todays(load_written_config_text(kEarlier, "state.json"));
}

TEST(RenamedKeysTest, AStrategyBecameAModelRunnerAndAGradientSync) {
  const std::map<std::string, std::pair<std::string, std::string>> both = {
      {"auto", {"plain", "auto"}},
      {"single", {"plain", "none"}},
      {"average", {"plain", "average"}},
      {"ddp", {"plain", "ddp"}},
      {"data_parallel", {"data_parallel", "auto"}},
      {"model_parallel", {"model_parallel", "auto"}},
      {"pipeline", {"pipeline", "auto"}}};
  for (const auto& [strategy, now] : both) {
    const Config config = load_written_config_text("distributed: {strategy: " + strategy + "}", "state.json");
    EXPECT_EQ(config.distributed.model, now.first);
    EXPECT_EQ(config.distributed.gradients, now.second);
    COHORT_EXPECT_THROW_WITH(
        load_config_text("", "defaults", {"distributed.strategy=" + strategy}), ConfigError,
        "the key 'distributed.strategy' was renamed. Try: distributed.model: " + now.first +
            ", distributed.gradients: " + now.second);
  }
}

TEST(RenamedKeysTest, TheConfigurationOfARunFolderIsTranslatedAndAUsersFileIsNot) {
  const test::TempDir dir;
  const std::filesystem::path file = dir.path() / "config.yaml";
  std::ofstream(file) << kEarlier;
  COHORT_EXPECT_THROW_WITH(load_config(file.string()), ConfigError, "line 2, column 8: the key 'data.kind'");
  std::ofstream(dir.path() / "run.json") << "{}";
  expect_todays(load_config(file.string()));
  COHORT_EXPECT_THROW_WITH(load_config(file.string(), {"data.kind=idx"}), ConfigError,
                           "override 'data.kind=idx': the key 'data.kind' was renamed. Try: data.type: idx");
}

TEST(RenamedKeysTest, AUsersFileGetsTheNewNameOfEachKeyAndValue) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"data: {uneven: pad}", "the key 'data.uneven' was renamed. Try: data.last_batch: pad"},
      {"data: {color: grey}", "data.color: got 'grey', expected one of rgb, gray. Try: data.color: gray"},
      {"data: {on_error: refuse}", "Try: data.on_error: raise"},
      {"data: {empty_class: refuse}", "Try: data.empty_class: raise"},
      {"data: {on_other_files: refuse}", "Try: data.on_other_files: raise"},
      {"train: {nan: stop}", "Try: train.on_nonfinite: stop"},
      {"distributed: {placements: \"cpu:0\"}", "Try: distributed.devices: cpu:0"},
      {"distributed: {place: {features: cpu:0}}", "Try: distributed.device_map"},
      {"distributed: {strategy: zero}", "Try: distributed.model and distributed.gradients"},
      {"comm: {check: always}", "Try: comm.check_consistency: always"},
      {"run: {images: 0}", "Try: run.log_images: 0"}};
  for (const auto& [yaml, message] : cases) {
    COHORT_EXPECT_THROW_WITH(load_config_text(yaml, "run.yaml"), ConfigError, message);
  }
  COHORT_EXPECT_THROW_WITH(load_config_text("", "defaults", {"distributed.place.layer1=cpu:1"}), ConfigError,
                           "Try: distributed.device_map.layer1: cpu:1");
}

}  // namespace
}  // namespace cohort::config
