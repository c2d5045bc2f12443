#include "cohort/base/log.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "tests/support/environment.h"

namespace cohort::base {
namespace {

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::kInfo);
    set_log_sink([this](LogLevel level, std::string_view line) { lines_.emplace_back(level, line); });
  }
  void TearDown() override {
    set_log_sink({});
    set_log_level(LogLevel::kInfo);
  }

  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST_F(LogTest, LinesBelowTheLevelAreNotWritten) {
  set_log_level(LogLevel::kWarning);
  log_debug("a");
  log_info("b");
  log_warning("c");
  log_error("d");
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_EQ(lines_[0], std::make_pair(LogLevel::kWarning, std::string("c")));
  EXPECT_EQ(lines_[1], std::make_pair(LogLevel::kError, std::string("d")));
  set_log_level(LogLevel::kOff);
  log_error("e");
  EXPECT_EQ(lines_.size(), 2u);
}

TEST_F(LogTest, WarnOnceWritesTheFirstLineOfAKey) {
  warn_once("log_test.key", "first");
  warn_once("log_test.key", "second");
  warn_once("log_test.other", "third");
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_EQ(lines_[0].second, "first");
  EXPECT_EQ(lines_[1].second, "third");
}

TEST_F(LogTest, LinesOfManyThreadsArriveWhole) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([]() {
      for (int k = 0; k < 250; ++k) log_info("the whole line");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines_.size(), 1000u);
  for (const auto& line : lines_) EXPECT_EQ(line.second, "the whole line");
}

// The variable is read once in a process, so each case runs in a process of its own.
void exit_after_logging(const char* level) {
  ::setenv("COHORT_LOG", level, 1);
  log_debug("a debug line");
  log_warning("a warning line");
  std::exit(0);
}

TEST(LogDeathTest, VariableSetsTheLevel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_after_logging("debug"), ::testing::ExitedWithCode(0), "a debug line");
}

TEST(LogDeathTest, VariableWithAnUnknownLevelIsSaidInTheFirstLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_after_logging("loud"), ::testing::ExitedWithCode(0),
              "COHORT_LOG: got .loud., expected one of debug");
}

}  // namespace
}  // namespace cohort::base
