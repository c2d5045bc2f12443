#include "cohort/launch/internal/agent_output.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/messages.h"

namespace cohort::launch {
namespace {

// What an agent logs of an attempt, with the level of each line.
std::string report_text(const AttemptReport& result, int attempt, int max_restarts) {
  std::string log;
  base::set_log_sink([&](base::LogLevel level, std::string_view line) {
    log += level == base::LogLevel::kError ? "E:" : level == base::LogLevel::kWarning ? "W:" : "I:";
    log += std::string(line) + "\n";
  });
  testing::internal::CaptureStderr();
  AgentOutput().report(result, 4, attempt, max_restarts);
  base::set_log_sink({});
  return log + testing::internal::GetCapturedStderr();
}

AttemptReport failed_report() {
  AttemptReport result;
  result.status = 3;
  RankFailure& failure = result.failures.emplace_back();
  failure.rank = 2;
  failure.what = "ended with status 3";
  return result;
}

TEST(AgentOutputTest, AFailureIsAnErrorAndOneThatIsFollowedByARestartIsAWarning) {
  AttemptReport result = failed_report();
  const std::string last = report_text(result, 1, 1);
  test::expect_in(last, {"E:", "rank 2 of 4 failed first: it ended with status 3"});
  EXPECT_EQ(last.find("started again"), std::string::npos) << last;
  result.restart = true;
  test::expect_in(report_text(result, 1, 3), {"W:", "all ranks are started again: restart 2 of 3"});
}

TEST(AgentOutputTest, TheSignalThatEndedTheJobIsNamedWithTheStatus) {
  AttemptReport result;
  result.signal = SIGTERM;
  result.status = 143;
  test::expect_in(report_text(result, 0, 0), {"I:", "ended by signal 15 (Terminated), with status 143"});
  EXPECT_EQ(report_text({}, 0, 0), "") << "a good end is no news";
}

}  // namespace
}  // namespace cohort::launch
