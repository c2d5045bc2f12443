// Which folder a run takes, and what it writes about itself.
#include "cohort/train/run_folder.h"

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;
using test::write_file;

// Run folders are found below the current one.
class RunFolderTest : public testing::Test {
 protected:
  void SetUp() override { fs::current_path(dir.path()); }
  void TearDown() override { fs::current_path(before); }

  const fs::path before = fs::current_path();
  const TempDir dir;
};

TEST_F(RunFolderTest, EachStartIsKept) {
  Config config;
  config.run.dir = "run";
  const RunFolder folder = RunFolder::open(config);
  folder.describe(config, "first");
  const std::string first = read_file("run/config.yaml");
  config.optim.lr = 0.5;
  folder.describe(config, "second");
  EXPECT_EQ(read_file("run/starts/0001/config.yaml"), first);
  EXPECT_NE(read_file("run/starts/0001/run.json").find("\"first\""), std::string::npos);
  EXPECT_NE(read_file("run/config.yaml"), first);
  for (const char* file : {"config.yaml", "run.json"}) {
    EXPECT_EQ(read_file(fs::path("run/starts/0002") / file), read_file(fs::path("run") / file));
  }
}

TEST_F(RunFolderTest, WhatARunOfAnOlderVersionLeftIsItsFirstStart) {
  write_file("run/config.yaml", "optim: {lr: 7}\n");
  Config config;
  config.run.dir = "run";
  RunFolder::open(config).describe(config, "now");
  EXPECT_EQ(read_file("run/starts/0001/config.yaml"), "optim: {lr: 7}\n");
  EXPECT_EQ(read_file("run/starts/0002/config.yaml"), read_file("run/config.yaml"));
}

}  // namespace
}  // namespace cohort::train
