#include "cohort/train/sinks/progress.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/config/keys.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

ProgressNumbers numbers() {
  ProgressNumbers n;
  n.epoch = 2;
  n.epochs = 8;
  n.step = 120;
  n.steps = 469;
  n.loss = 0.41234;
  n.accuracy = 0.8765;
  n.lr = 0.05;
  n.samples_per_second = 5432.1;
  n.data_wait = 0.012;
  n.memory_bytes = int64_t{700} << 20;
  n.seconds_left = 95;
  return n;
}

/// What is written by `body`, to a file that stands for a terminal or a log.
template <typename Body>
std::string written(ProgressOptions options, const Body& body) {
  test::TempDir dir;
  const std::string path = (dir / "out").string();
  options.out = std::fopen(path.c_str(), "w");
  {
    Progress progress(options);
    body(progress);
  }
  std::fclose(options.out);
  return test::read_file(path);
}

TEST(ProgressTest, TheBarShowsEverythingWhereThereIsRoom) {
  EXPECT_EQ(progress_bar_line(numbers(), 140, false),
            "epoch 2/8  [#######---------------------]  120/469  loss 0.4123  acc 87.65%  5432 samples/s  "
            "wait 1.2%  "
            "700 MiB  1:35 left");
}

TEST(ProgressTest, TheBarFitsEveryWidthAndKeepsWhatMattersLongest) {
  for (int width = 1; width <= 160; ++width) {
    const std::string line = progress_bar_line(numbers(), width, false);
    EXPECT_LE(line.size(), static_cast<size_t>(width));
    if (width >= 24) {
      EXPECT_NE(line.find("loss"), std::string::npos) << width << ": " << line;
    }
  }
  EXPECT_EQ(progress_bar_line(numbers(), 10, false), "epoch 2/8");
}

TEST(ProgressTest, ThePlainLineHasEveryNumber) {
  EXPECT_EQ(
      progress_plain_line(numbers()),
      "train epoch 2/8 step 120/469  loss 0.4123  accuracy 87.65%  lr 0.05  5432 samples/s  data wait 1.2%  "
      "memory 700 MiB  left 1:35");
  ProgressNumbers bare;
  bare.phase = "eval";
  EXPECT_EQ(progress_plain_line(bare), "eval epoch 1/1 step 0");
}

TEST(ProgressTest, DurationsAndBytesReadWell) {
  EXPECT_EQ(format_duration(7), "0:07");
  EXPECT_EQ(format_duration(245), "4:05");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(-1), "-");
  EXPECT_EQ(format_bytes(int64_t{3} << 30), "3.0 GiB");
  EXPECT_EQ(format_bytes(2048), "2 KiB");
}

TEST(ProgressTest, WithoutATerminalThereArePlainLinesEveryLogEvery) {
  const std::string text = written({.log_every = 2}, [](Progress& progress) {
    EXPECT_FALSE(progress.is_bar());
    for (int64_t step = 1; step <= 5; ++step) {
      ProgressNumbers n;
      n.step = step;
      progress.update(n);
    }
    progress.print("done");
  });
  EXPECT_EQ(text, "train epoch 1/1 step 2\ntrain epoch 1/1 step 4\ndone\n");
}

TEST(ProgressTest, TheBarIsDrawnRarelyStaysBelowPrintedLinesAndGivesTheCursorBack) {
  const std::string text =
      written({.mode = ProgressMode::kBar, .min_interval = std::chrono::hours(1)}, [](Progress& progress) {
        for (int i = 0; i < 1000; ++i) progress.update(numbers());
        progress.print("a line");
      });
  size_t drawn = 0;
  for (size_t at = 0; (at = text.find("epoch 2/8", at)) != std::string::npos; ++at) ++drawn;
  EXPECT_EQ(drawn, 2U);  // the first update, and again below the line
  EXPECT_NE(text.find("\r\x1b[2K\x1b[?25ha line\n"), std::string::npos);
  EXPECT_TRUE(text.ends_with("\x1b[?25h"));
}

TEST(ProgressTest, OffIsSilentAndUnknownModesAreRejected) {
  EXPECT_EQ(written({.mode = progress_mode("off")}, [](Progress& p) { p.update(numbers()), p.print("x"); }),
            "");
  COHORT_EXPECT_THROW_WITH(progress_mode("loud"), ConfigError,
                           "run.progress: got 'loud', expected one of auto, bar, plain, off");
  const std::vector<std::string>& names = config::find_key("run.progress")->choices;
  EXPECT_EQ(names.size(), 4U);
  for (const std::string& name : names) EXPECT_NO_THROW(progress_mode(name)) << name;
}

}  // namespace
}  // namespace cohort::train
