#include "cohort/train/internal/fit/trace_recorder.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "cohort/train/internal/fit/group_coordinator.h"
#include "tests/support/temp_dir.h"

namespace cohort::train {
namespace {

using base::Timeline;

TEST(TraceRecorderTest, TheFirstStepsAreRecordedAndWritten) {
  const test::TempDir dir;
  const TrainerOptions options = TrainerOptions().trace_steps(2).run_dir(dir.path());
  const GroupCoordinator ranks(nullptr);
  TraceRecorder trace(options, ranks);
  EXPECT_FALSE(Timeline::enabled());
  trace.begin();
  EXPECT_TRUE(Timeline::enabled());
  EXPECT_FALSE(trace.is_over(1));
  EXPECT_TRUE(trace.is_over(2));
  EXPECT_FALSE(std::filesystem::exists(dir / "trace.json"));
  trace.end();
  EXPECT_FALSE(Timeline::enabled());
  EXPECT_TRUE(std::filesystem::remove(dir / "trace.json"));
  EXPECT_FALSE(trace.is_over(3));
  trace.end();
  EXPECT_FALSE(std::filesystem::exists(dir / "trace.json")) << "it is written once";
}

TEST(TraceRecorderTest, AFitThatEndsEarlierWritesWhatThereIsAndOneWithoutAFolderNothing) {
  const test::TempDir dir;
  const TrainerOptions in_folder = TrainerOptions().trace_steps(9).run_dir(dir.path()),
                       without_folder = TrainerOptions().trace_steps(9);
  const GroupCoordinator ranks(nullptr);
  for (const TrainerOptions* options : {&in_folder, &without_folder}) {
    TraceRecorder trace(*options, ranks);
    trace.begin();
    trace.end();
    EXPECT_FALSE(Timeline::enabled());
  }
  EXPECT_TRUE(std::filesystem::exists(dir / "trace.json"));
}

TEST(TraceRecorderTest, AFitThatThrowsRecordsNoMoreAndWritesNothing) {
  const test::TempDir dir;
  const TrainerOptions options = TrainerOptions().trace_steps(9).run_dir(dir.path());
  const GroupCoordinator ranks(nullptr);
  {
    TraceRecorder trace(options, ranks);
    trace.begin();
  }
  EXPECT_FALSE(Timeline::enabled());
  EXPECT_FALSE(std::filesystem::exists(dir / "trace.json"));
}

TEST(TraceRecorderTest, ARecordingThatSomebodyElseBeganIsLeftAlone) {
  const TrainerOptions options;
  const GroupCoordinator ranks(nullptr);
  TraceRecorder trace(options, ranks);
  Timeline::start();
  trace.begin();
  trace.end();
  EXPECT_TRUE(Timeline::enabled());
  Timeline::stop();
}

}  // namespace
}  // namespace cohort::train
