// Which folder a run takes, and what it writes about itself.
#include "cohort/train/run_folder.h"

#include <gtest/gtest.h>
#include <time.h>

#include <ctime>

#include "cohort/base/error.h"
#include "tests/support/environment.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;
using test::write_file;

RunFolder open_folder(const config::Config& config) {
  return RunFolder::open(config.run, run_name(config.run, config.model));
}

// Run folders are found below the current one.
class RunFolderTest : public testing::Test {
 protected:
  void SetUp() override { fs::current_path(dir.path()); }
  void TearDown() override { fs::current_path(before); }

  static void make_run(const std::string& folder) {
    write_file(fs::path("runs") / folder / "metrics.jsonl", "{\"type\":\"step\",\"step\":1,\"epoch\":1}\n");
  }
  static std::string resumed(const std::string& name) {
    config::Config config;
    config.run.name = name;
    config.run.resume = "auto";
    return open_folder(config).path().filename().string();
  }

  const fs::path before = fs::current_path();
  const TempDir dir;
};

TEST_F(RunFolderTest, ResumeAutoTakesNoRunWhoseNameOnlyBeginsTheSame) {
  make_run("exp-20260101-100000");
  for (const char* other :
       {"exp-3-20260601-100000", "exp-50-20260601-100000-2", "exp-01-20260601-100000", "exp-20260601",
        "exp-20260601-100000-x", "exp-20260601-100000x", "exp-20260601-1000000", "exp-20260601-100000-2-3",
        "exp-20260701-100000-20260801-100000", "exp-dev-20260601-100000", "exp2-20260601-100000"}) {
    make_run(other);
  }
  EXPECT_EQ(resumed("exp"), "exp-20260101-100000");
  EXPECT_EQ(resumed("exp-3"), "exp-3-20260601-100000");
  EXPECT_EQ(resumed("exp-20260701-100000"), "exp-20260701-100000-20260801-100000");
}

TEST_F(RunFolderTest, AConfigurationIsOfARunWhereTheRunWroteItsRunJsonBesideIt) {
  make_run("a");
  const fs::path folder = fs::canonical("runs/a");
  config::Config config;
  config.run.resume = "auto";
  config.run.dir = "runs/a";
  open_folder(config).describe(config, "test");
  EXPECT_EQ(run_folder_of("runs/a/config.yaml"), folder);
  EXPECT_EQ(run_folder_of("runs/a/starts/0001/config.yaml"), folder);
  EXPECT_EQ(run_folder_of("runs/a/run.json"), "");
  // A project, with a run folder of its own somewhere else.
  for (const char* file : {"checkpoints/pretrained.safetensors", "metrics.jsonl", "starts/1/notes"})
    write_file(fs::path("project") / file, "1");
  for (const char* file : {"project/config.yaml", "project/starts/1/config.yaml"}) {
    write_file(file, "");
    EXPECT_EQ(run_folder_of(file), "");
  }
}

TEST_F(RunFolderTest, ResumeAutoTakesTheNewestAlsoOfRunsThatBeganInOneSecond) {
  for (const char* run :
       {"a+b-20260101-100000", "a+b-20260101-100000-2", "a+b-20260101-100000-10", "a+b-20251231-235959-11"}) {
    make_run(run);
  }
  EXPECT_EQ(resumed("a+b"), "a+b-20260101-100000-10");
}

TEST_F(RunFolderTest, ANewFolderIsNamedInUtcWhereverItIsMade) {
  for (const char* zone : {"WEST12", "EAST-12", "UTC0"}) {
    const test::ScopedEnv environment("TZ", zone);
    ::tzset();
    config::Config config;
    config.run.name = "exp";
    const std::time_t before = std::time(nullptr);
    const RunFolder folder = open_folder(config);
    const std::time_t after = std::time(nullptr);
    std::tm named{};
    const std::string name = folder.path().filename().string();
    ASSERT_NE(::strptime(name.c_str(), "exp-%Y%m%d-%H%M%S", &named), nullptr) << name;
    EXPECT_GE(::timegm(&named), before) << zone;
    EXPECT_LE(::timegm(&named), after) << zone;
  }
  ::tzset();
}

TEST_F(RunFolderTest, ACheckpointOrItsRunByPathContinuesInThatRun) {
  make_run("exp-20260101-100000");
  fs::create_directories("runs/exp-20260101-100000/checkpoints/epoch_0001");
  for (const char* path : {"runs/exp-20260101-100000", "runs/exp-20260101-100000/",
                           "runs/exp-20260101-100000/checkpoints/epoch_0001"}) {
    config::Config config;
    config.run.resume = path;
    EXPECT_EQ(open_folder(config).path().filename(), "exp-20260101-100000") << path;
  }
}

TEST_F(RunFolderTest, ARunThatDidNotBeginTakesNothingAwayThatWasThere) {
  fs::create_directories("scratch");
  fs::create_directory_symlink("scratch", "link");
  fs::create_directories("mine");
  for (const char* folder : {"mine", "link", "new"}) {
    config::Config config;
    config.run.dir = folder;
    open_folder(config);
    EXPECT_EQ(fs::exists(folder), folder != std::string("new")) << folder;
  }
  EXPECT_TRUE(fs::is_symlink("link"));
  EXPECT_TRUE(fs::is_empty("scratch") && fs::is_empty("mine"));
}

TEST_F(RunFolderTest, EachStartIsKept) {
  config::Config config;
  config.run.dir = "run";
  const RunFolder folder = open_folder(config);
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

TEST_F(RunFolderTest, AStartThatSeveralProcessesDescribeIsKeptOnce) {
  config::Config config;
  config.run.dir = "run";
  const RunFolder folder = open_folder(config);
  folder.describe(config, "first", 2, "a");
  folder.describe(config, "again", 3, "a");
  EXPECT_FALSE(fs::exists("run/starts/0002"));
  EXPECT_NE(read_file("run/starts/0001/run.json").find("\"again\""), std::string::npos);
  folder.describe(config, "next", 2, "b");
  EXPECT_TRUE(fs::exists("run/starts/0002"));
  folder.describe(config, "not elastic");
  folder.describe(config, "not elastic");
  EXPECT_TRUE(fs::exists("run/starts/0004"));
}

TEST_F(RunFolderTest, WhatARunOfAnOlderVersionLeftIsItsFirstStart) {
  write_file("run/config.yaml", "optim: {lr: 7}\n");
  config::Config config;
  config.run.dir = "run";
  open_folder(config).describe(config, "now");
  EXPECT_EQ(read_file("run/starts/0001/config.yaml"), "optim: {lr: 7}\n");
  EXPECT_EQ(read_file("run/starts/0002/config.yaml"), read_file("run/config.yaml"));
}

}  // namespace
}  // namespace cohort::train
