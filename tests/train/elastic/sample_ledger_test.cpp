#include "cohort/train/internal/elastic/sample_ledger.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

constexpr const char* kThreeSteps = "step,epoch,samples\n1,1,5 6|7\n2,1,|8\n3,2,1|\n";

void write_three(SampleLedger& ledger) {
  ledger.write({1, 1, {{0, {5, 6}}, {1, {7}}}}, 2);
  ledger.write({2, 1, {{1, {8}}}}, 2);
  ledger.write({3, 2, {{0, {1}}}}, 2);
}

TEST(SampleLedgerTest, AStepHasOneLineWhoeverWritesIt) {
  const test::TempDir dir;
  const auto path = dir / "ledger.csv";
  {
    SampleLedger ledger(path);
    EXPECT_EQ(ledger.last_step(), 0);
    write_three(ledger);
    write_three(ledger);
  }
  EXPECT_EQ(test::read_file(path), kThreeSteps);
  SampleLedger next(path);
  EXPECT_EQ(next.last_step(), 3);
  write_three(next);
  EXPECT_EQ(test::read_file(path), kThreeSteps);
  next.write({4, 2, {{0, {2}}, {1, {3}}}}, 2);
  EXPECT_EQ(test::read_file(path), std::string(kThreeSteps) + "4,2,2|3\n");
}

TEST(SampleLedgerTest, ALineThatWasCutOffAnywhereIsWrittenAgain) {
  const std::string whole = kThreeSteps;
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const test::TempDir dir;
    const auto path = dir / "ledger.csv";
    std::ofstream(path) << whole.substr(0, length);
    SampleLedger ledger(path);
    write_three(ledger);
    EXPECT_EQ(test::read_file(path), whole) << "cut at " << length;
  }
}

TEST(SampleLedgerTest, ARunThatResumesWritesItsStepsAgain) {
  const test::TempDir dir;
  const auto path = dir / "ledger.csv";
  SampleLedger ledger(path);
  // Lines longer than what is read at once.
  std::vector<std::int64_t> many(9000, 1234567);
  for (std::int64_t step = 1; step <= 5; ++step) ledger.write({step, 1, {{0, many}}}, 1);
  ledger.truncate_after(7);
  EXPECT_EQ(ledger.last_step(), 5);
  ledger.truncate_after(2);
  EXPECT_EQ(ledger.last_step(), 2);
  ledger.write({3, 1, {{0, {9}}}}, 1);
  const std::string text = test::read_file(path);
  EXPECT_TRUE(text.ends_with("\n3,1,9\n"));
  EXPECT_EQ(text.find("4,1,"), std::string::npos);
  ledger.truncate_after(0);
  EXPECT_EQ(test::read_file(path), "step,epoch,samples\n");
}

TEST(SampleLedgerTest, ALineThatIsNotTheNextOneIsAnError) {
  const test::TempDir dir;
  SampleLedger ledger(dir / "ledger.csv");
  write_three(ledger);
  COHORT_EXPECT_THROW_WITH(ledger.write({5, 2, {}}, 2), SystemError,
                           "ends with step 3, and the next line is of step 5: lines in between are lost");
  ledger.sync();
  EXPECT_EQ(test::read_file(dir / "ledger.csv"), kThreeSteps);
}

TEST(SampleLedgerTest, ARunThatBeganWithoutTheLedgerHasNoLinesOfItsFirstSteps) {
  const test::TempDir dir;
  SampleLedger ledger(dir / "ledger.csv");
  write_three(ledger);
  EXPECT_EQ(ledger.begin_after(2), 0);
  EXPECT_EQ(ledger.last_step(), 3);
  EXPECT_EQ(ledger.begin_after(7), 4);
  ledger.write({8, 3, {}}, 2);
  EXPECT_EQ(test::read_file(dir / "ledger.csv"), std::string(kThreeSteps) + "8,3,|\n");
}

TEST(SampleLedgerTest, AFileThatCannotBeReadIsAnErrorAndStaysAsItIs) {
  const test::TempDir dir;
  std::filesystem::create_directory(dir / "ledger.csv");
  COHORT_EXPECT_THROW_WITH(SampleLedger(dir / "ledger.csv"), SystemError, "cannot be read: Is a directory");
  const auto path = dir / "whole.csv";
  test::write_file(path, kThreeSteps);
  // No file can be opened.
  struct rlimit limit {
  }, none{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  none = limit;
  none.rlim_cur = 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  std::string error;
  try {
    const SampleLedger ledger(path);
  } catch (const SystemError& thrown) {
    error = thrown.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_NE(error.find("whole.csv cannot be read: Too many open files"), std::string::npos) << error;
  EXPECT_EQ(test::read_file(path), kThreeSteps);
}

TEST(SampleLedgerTest, AFolderThatIsNotThereIsAnError) {
  const test::TempDir dir;
  COHORT_EXPECT_THROW_WITH(SampleLedger(dir / "none" / "ledger.csv"), SystemError,
                           "cannot be opened for writing");
}

}  // namespace
}  // namespace cohort::train
