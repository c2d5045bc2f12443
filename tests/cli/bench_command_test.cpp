// `cohort bench`, without the rest of the program.
#include <gtest/gtest.h>

#include <fstream>

#include "cohort/base/error.h"
#include "tests/cli/command.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::cli {
namespace {

class BenchCommandTest : public testing::Test {
 protected:
  BenchCommandTest() : config((folder.path() / "run.yaml").string()) {
    std::ofstream(config) << "model: {name: mlp, num_classes: 4, options: {hidden: \"16\"}}\n"
                             "data: {type: synthetic, image_size: 8, color: gray, synthetic_train: 16}\n"
                             "train: {batch_size: 8, device: cpu, threads: 1}\n";
  }
  std::string run(std::vector<std::string> words) {
    words.insert(words.begin(), {"script", "--rounds", "2", "--seconds", "0.001", "--config", config});
    return test::run_command(add_bench, "bench", std::move(words));
  }
  const test::TempDir folder;
  const std::string config;
};

TEST_F(BenchCommandTest, ScriptSaysTimesProgramsMemoryAndWhetherTheNumbersAreTheSame) {
  const std::string out = run({});
  EXPECT_EQ(out.find("mlp, batches of 8, 1 thread\ntraining step  "), 0U) << out;
  for (const char* part :
       {" eager, ", " with script: ", "evaluation     ", "peak of a step ", "weights        the same bits",
        "training: 1 of 8 programs", "evaluation: 1 of 8 programs", "operators recorded",
        "values saved for backward"}) {
    EXPECT_NE(out.find(part), std::string::npos) << part << "\n" << out;
  }
  EXPECT_EQ(out.find("eager: "), std::string::npos) << out;
}

TEST_F(BenchCommandTest, ScriptTakesTheConfigurationsKeysAndRejectsModelRunnersOnPlacements) {
  const std::string out = run({"train.batch_size=6", "train.accumulate=2", "train.precision=bf16"});
  EXPECT_EQ(out.find("mlp, batches of 12"), 0U) << out;
  COHORT_EXPECT_THROW_WITH(run({"distributed.model=pipeline"}), ConfigError,
                           "train.script is true and distributed.model is pipeline");
  COHORT_EXPECT_THROW_WITH(test::run_command(add_bench, "bench", {"script"}), UsageError,
                           "neither a configuration nor data was given");
}

}  // namespace
}  // namespace cohort::cli
