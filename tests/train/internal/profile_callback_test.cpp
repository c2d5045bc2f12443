#include "cohort/train/internal/profile_callback.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

using test::message_contains;
using test::TempDir;

/// What Trainer does: `steps` steps of one operator each, then the end.
void run(ProfileCallback& callback, int steps) {
  const at::Tensor x = at::ones({4});
  for (int step = 0; step < steps; ++step) {
    at::neg(x);
    callback.on_step_end({});
  }
  callback.on_fit_end({});
}

TEST(ProfileCallbackTest, CountsTheStepsAfterTheWarmUp) {
  TempDir dir;
  ProfileCallback callback(dir / "profile.json", 4);
  run(callback, 20);
  EXPECT_TRUE(message_contains(callback.table(), "aten::neg"));
  EXPECT_TRUE(message_contains(callback.table(), "4 steps, "));
  const std::string trace = test::read_file(dir / "profile.json");
  std::size_t found = 0;
  for (auto at = trace.find("aten::neg"); at != std::string::npos; at = trace.find("aten::neg", at + 1))
    ++found;
  EXPECT_EQ(found, 4u);
}

TEST(ProfileCallbackTest, ARunThatEndsEarlyIsProfiledAsFarAsItGot) {
  TempDir dir;
  ProfileCallback callback(dir / "profile.json", 100);
  run(callback, 5);
  EXPECT_TRUE(message_contains(callback.table(), "2 steps, "));
}

TEST(ProfileCallbackTest, ARunThatEndsWithinTheWarmUpIsAWarning) {
  for (const int steps : {2, 3}) {
    TempDir dir;
    ProfileCallback callback(dir / "profile.json", 1);
    ::testing::internal::CaptureStderr();
    run(callback, steps);
    EXPECT_TRUE(
        message_contains(::testing::internal::GetCapturedStderr(),
                         "nothing was profiled: the run ended after " + std::to_string(steps) + " steps"));
    EXPECT_EQ(callback.table(), "");
    EXPECT_FALSE(std::filesystem::exists(dir / "profile.json"));
  }
}

}  // namespace
}  // namespace cohort::train
