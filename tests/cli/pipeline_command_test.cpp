// `cohort pipeline`, without the rest of the program.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "cohort/base/error.h"
#include "tests/cli/command.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::cli {
namespace {

std::string run(const std::vector<std::string>& words) {
  return test::run_command(add_pipeline, "pipeline", words);
}

TEST(PipelineCommandTest, ShowsWhatAPlanCosts) {
  const std::string out = run({"--schedule", "1f1b", "--stages", "4", "--micro-batches", "8"});
  EXPECT_NE(out.find("1f1b: 4 stages on 4 placements, 8 micro-batches"), std::string::npos) << out;
  EXPECT_NE(out.find("idle 27.27 % (formula 27.27 %)"), std::string::npos) << out;
  EXPECT_NE(out.find("activations held at most, by placement: 4 3 2 1"), std::string::npos) << out;
}

TEST(PipelineCommandTest, ListsActionsOnRequest) {
  const std::string out = run({"--stages", "2", "--micro-batches", "1", "--actions"});
  EXPECT_NE(out.find("placement 1: rA1.0 F1.0 B1.0 sG1.0"), std::string::npos) << out;
}

TEST(PipelineCommandTest, DrawsThePlanAndWhatWasMeasured) {
  const test::TempDir folder;
  const auto path = folder.path() / "plan.svg";
  const std::string out = run({"--schedule", "zb_h1", "--stages", "2", "--micro-batches", "3", "--measure",
                               "0.5", "--draw", path.string()});
  EXPECT_NE(out.find("measured: time "), std::string::npos) << out;
  std::ostringstream svg;
  svg << std::ifstream(path).rdbuf();
  EXPECT_NE(svg.str().find("plan, zb_h1"), std::string::npos);
  EXPECT_NE(svg.str().find("measured, with stages that sleep"), std::string::npos);
  EXPECT_NE(svg.str().find("<title>W1.2 "), std::string::npos);
}

TEST(PipelineCommandTest, RejectsWhatIsNoSchedule) {
  COHORT_EXPECT_THROW_WITH(run({"--schedule", "zb"}), UsageError, "there is no pipeline schedule 'zb'");
  COHORT_EXPECT_THROW_WITH(run({"--schedule", "1f1b", "--placements", "2"}), UsageError,
                           "got 4 stages on 2 placements");
}

}  // namespace
}  // namespace cohort::cli
