#include "cohort/train/sinks/sink_callbacks.h"

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace cohort::train {
namespace {

std::uintmax_t bytes_in(const std::filesystem::path& folder) {
  std::uintmax_t bytes = 0;
  for (const auto& item : std::filesystem::directory_iterator(folder)) bytes += item.file_size();
  return bytes;
}

TEST(TensorBoardCallbackTest, AStepThatIsLoggedIsInTheFileAtOnce) {
  test::TempDir dir;
  TensorBoardCallback callback(dir / "tensorboard", 0, {}, {});
  callback.on_start_counts({.epochs = 1, .steps_per_epoch = 100});
  StepReport report;
  report.step = 1;
  report.averages = {{"loss", 0.5}};
  callback.on_step_end(report);
  const auto before = bytes_in(dir / "tensorboard");
  report.logged = true;
  callback.on_step_end(report);
  EXPECT_GT(bytes_in(dir / "tensorboard"), before + 100);
}

}  // namespace
}  // namespace cohort::train
