// `cohort plan`, without the rest of the program.
#include <gtest/gtest.h>

#include <fstream>

#include "cohort/base/error.h"
#include "tests/cli/command.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::cli {
namespace {

std::string run(const std::vector<std::string>& words) {
  return test::run_command(add_plan, "plan", words);
}

class PlanCommandTest : public testing::Test {
 protected:
  PlanCommandTest() : config((folder.path() / "run.yaml").string()) {
    std::ofstream(config) << "model: {name: lenet5, num_classes: 10}\n"
                             "data: {type: synthetic, image_size: 28, color: gray}\n"
                             "train: {batch_size: 8, device: cpu}\n";
  }
  const test::TempDir folder;
  const std::string config;
};

TEST_F(PlanCommandTest, PrintsWhatIsPredictedAndMeasured) {
  const std::string out = run({"--memory", "-c", config, "--measure", "train.batch_size=16"});
  EXPECT_NE(out.find("lenet5, plain, gradients none, 1 rank, 16 samples at once; MiB"), std::string::npos)
      << out;
  EXPECT_NE(out.find("predicted     measured"), std::string::npos) << out;
  EXPECT_NE(out.find("exact"), std::string::npos) << out;
}

TEST_F(PlanCommandTest, PrintsJsonOnRequest) {
  const std::string out = run({"--memory", "--config", config, "--json"});
  EXPECT_NE(out.find("\"parameters\": 246824"), std::string::npos) << out;  // 61,706 of 4 bytes
  EXPECT_NE(out.find("\"samples\": 8"), std::string::npos) << out;
}

TEST_F(PlanCommandTest, SaysWhatIsMissing) {
  COHORT_EXPECT_THROW_WITH(run({"-c", config}), UsageError, "no option says what to plan");
  COHORT_EXPECT_THROW_WITH(run({"--memory"}), UsageError, "neither a configuration nor data was given");
  COHORT_EXPECT_THROW_WITH(run({"--memory", "-c", config, "--device-map", "layer4"}), UsageError,
                           "expected LAYER=PLACEMENT");
  COHORT_EXPECT_THROW_WITH(run({"--memory", "-c", config, "--place", "layer4=cpu:1"}), UsageError,
                           "--place has a new name: --device-map. Try: --device-map layer4=cpu:1");
}

TEST_F(PlanCommandTest, NeedsNoFileWhereItIsSaidWhereTheDataIs) {
  const std::string out = run({"--memory", "data.type=synthetic", "model.name=lenet5", "model.num_classes=10",
                               "data.image_size=28", "data.color=gray", "train.device=cpu", "--json"});
  EXPECT_NE(out.find("\"parameters\": 246824"), std::string::npos) << out;
}

TEST_F(PlanCommandTest, TakesOneFile) {
  COHORT_EXPECT_THROW_WITH(run({"--memory", "-c", config, "--config", "b.yaml"}), UsageError,
                           "--config is given 2 times: " + config + ", b.yaml. Try: one file, and key=value");
  // What follows the file's name is no other file.
  EXPECT_NE(run({"--memory", "--config", config, "train.batch_size=16"}).find("16 samples at once"),
            std::string::npos);
}

}  // namespace
}  // namespace cohort::cli
