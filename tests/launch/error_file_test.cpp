#include "cohort/launch/error_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/launch/internal/failure.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

TEST(ErrorFileTest, WhatIsRecordedIsRead) {
  const test::TempDir dir;
  const test::ScopedEnv file("TORCHELASTIC_ERROR_FILE", (dir / "error.json").string());
  record_error("no \"luck\"\n\xff");
  record_error("a later one");
  const auto error = read_error_file(dir / "error.json");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "no \"luck\"\n\xEF\xBF\xBD") << "bytes that are no UTF-8 are replaced";
  EXPECT_GT(error->time, 1.6e9);
  // As torch.distributed.elastic reads it.
  const auto data = nlohmann::json::parse(test::read_file(dir / "error.json"));
  EXPECT_GT(std::stoll(data["message"]["extraInfo"]["timestamp"].get<std::string>()), 1'600'000'000);
}

TEST(ErrorFileTest, WithoutALauncherNothingIsWritten) {
  const test::ScopedEnv file("TORCHELASTIC_ERROR_FILE", std::nullopt);
  EXPECT_NO_THROW(record_error("text"));
  const test::ScopedEnv nowhere("TORCHELASTIC_ERROR_FILE", "/nonexistent/folder/error.json");
  EXPECT_NO_THROW(record_error("text"));
}

TEST(ErrorFileTest, EachFormatIsRead) {
  const test::TempDir dir;
  const auto read = [&](const char* text) {
    test::write_file(dir / "e", text);
    return *read_error_file(dir / "e");
  };
  EXPECT_EQ(read(R"({"message": "short", "timestamp": "1"})").message, "short");
  const RecordedError full = read(
      R"({"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}})");
  EXPECT_EQ(full.message, "ValueError: x");
  EXPECT_EQ(full.details, "Traceback");
  EXPECT_EQ(read(R"({"message": {"message": 5}})").message, "5");
  EXPECT_EQ(read("no json").message, "no json");
  EXPECT_EQ(read(R"({"other": 1})").message, R"({"other": 1})");
  EXPECT_EQ(read(R"([1])").message, "[1]");
  EXPECT_FALSE(read_error_file(dir / "none"));
  test::write_file(dir / "empty", "");
  EXPECT_FALSE(read_error_file(dir / "empty"));
}

RankFailure failure(int rank, double time, const std::string& message) {
  return {.rank = rank,
          .local_rank = 0,
          .node = rank,
          .host = "host",
          .pid = 1,
          .attempt = 0,
          .status = 3,
          .what = "ended with status 3",
          .message = message,
          .details = "",
          .time = time,
          .last_lines = {}};
}

TEST(FailureTest, TheEarliestIsTheCause) {
  std::vector<RankFailure> failures{failure(0, 20, "connection closed"), failure(1, 10, "out of luck"),
                                    failure(2, 30, "")};
  failures[1].last_lines = {"step 1", "step 2"};
  EXPECT_EQ(first_of(failures).rank, 1);
  test::expect_in(
      describe(failures, 3),
      {"rank 1 of 3 failed first: it ended with status 3 (node 1, host host", "its error:\n    out of luck",
       "the last it printed:\n    step 1\n    step 2",
       "\n  then rank 0 ended with status 3: connection closed", "\n  then rank 2 ended with status 3"});
  test::expect_in(describe({failure(0, 1, "")}, 1), {"it printed nothing, and recorded no error"});
}

TEST(FailureTest, ReportsTravelAsText) {
  const AttemptReport report{
      .restart = true, .status = 3, .signal = 2, .failures = {failure(1, 1.25, "x\ny")}};
  const AttemptReport copy = AttemptReport::from_json(report.to_json());
  EXPECT_TRUE(copy.restart);
  EXPECT_EQ(copy.status, 3);
  EXPECT_EQ(copy.signal, 2);
  EXPECT_EQ(copy.failures, report.failures);
  COHORT_EXPECT_THROW_WITH(AttemptReport::from_json("{}"), CommError,
                           "another agent's report cannot be read");
}

}  // namespace
}  // namespace cohort::launch
