// The callback of docs/guide/trainer.md, compiled and used.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "cohort/train/callback.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::train {
namespace {

// clang-format off

struct StepTimes : cohort::train::Callback {
  StepTimes(std::filesystem::path path, int rank) : path(std::move(path)), rank(rank) {}
  void on_start_counts(const cohort::train::FitInfo& info) override {
    if (rank != 0) return;
    std::ifstream before(path);
    std::string kept;                                    // rows of steps that are not made again
    for (std::string row; std::getline(before, row) && std::stoll(row) <= info.first_step;) kept += row + "\n";
    file.open(path);
    file << kept;
  }
  void on_step_end(const cohort::train::StepReport& report) override {
    if (rank == 0) file << report.step << " " << report.seconds << std::endl;   // a kill leaves whole rows
  }
  std::filesystem::path path;
  int rank;
  std::ofstream file;
};

// clang-format on

void make_steps(StepTimes& times, std::int64_t first, std::int64_t last) {
  times.on_start_counts({.first_step = first - 1});
  for (std::int64_t step = first; step <= last; ++step) {
    StepReport report;
    report.step = step;
    report.seconds = 0.5;
    times.on_step_end(report);
  }
}

TEST(CallbackExampleTest, StandsInTheGuideAsItIsCompiled) {
  const std::string here = test::read_file(test::source_dir() / "tests/train/callback_example_test.cpp");
  const std::string page = test::read_file(test::source_dir() / "docs/guide/trainer.md");
  const std::size_t begin = here.find("struct StepTimes"), end = here.find("\n};\n", begin);
  ASSERT_NE(end, std::string::npos);
  EXPECT_NE(page.find(here.substr(begin, end + 4 - begin)), std::string::npos);
}

TEST(CallbackExampleTest, AResumeKeepsTheRowsOfStepsThatAreNotMadeAgain) {
  const test::TempDir dir;
  const std::filesystem::path path = dir / "step_times.txt";
  StepTimes killed(path, 0);
  make_steps(killed, 1, 3);
  EXPECT_EQ(test::read_file(path), "1 0.5\n2 0.5\n3 0.5\n");
  StepTimes resumed(path, 0);
  make_steps(resumed, 3, 4);
  EXPECT_EQ(test::read_file(path), "1 0.5\n2 0.5\n3 0.5\n4 0.5\n");
  StepTimes afresh(path, 0);
  make_steps(afresh, 1, 1);
  EXPECT_EQ(test::read_file(path), "1 0.5\n");
}

TEST(CallbackExampleTest, OtherRanksWriteNothing) {
  const test::TempDir dir;
  StepTimes times(dir / "step_times.txt", 1);
  make_steps(times, 1, 2);
  EXPECT_FALSE(std::filesystem::exists(dir / "step_times.txt"));
}

}  // namespace
}  // namespace cohort::train
