// What a full disk and a kill leave behind. The child is this executable again, with one test that is
// disabled otherwise; it reads COHORT_CRASH_FOLDER and COHORT_CRASH_MODE.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

extern char** environ;

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNumel = 200'000;

CheckpointContent large_content_of(int64_t value) {
  return {{{"a", at::full({kNumel}, value, at::kLong)}, {"b", at::full({3}, value, at::kLong)}},
          {{"m", at::full({kNumel}, value, at::kLong)}},
          {{"value", value}}};
}

void expect_whole(const fs::path& folder) {
  const CheckpointContent content = RunCheckpoints::load(folder);
  const auto value = content.state.at("value").get<int64_t>();
  for (const TensorMap* tensors : {&content.model, &content.optimizer}) {
    for (const auto& [name, tensor] : *tensors) {
      EXPECT_EQ(tensor.min().item<int64_t>(), value) << folder << " " << name;
      EXPECT_EQ(tensor.max().item<int64_t>(), value) << folder << " " << name;
    }
  }
}

/// Starts this executable's disabled test `name` with standard output going to a pipe that is returned in
/// `out`.
pid_t start_child(const std::string& name, const fs::path& folder, int* out) {
  ::setenv("COHORT_CRASH_FOLDER", folder.c_str(), 1);
  int pipe_ends[2];
  if (::pipe(pipe_ends) != 0) return -1;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], 3);
  const std::string self = fs::read_symlink("/proc/self/exe");
  const std::string filter = "--gtest_filter=CrashChild.DISABLED_" + name;
  const char* argv[] = {self.c_str(), filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                        nullptr};
  pid_t child = -1;
  ::posix_spawn(&child, self.c_str(), &actions, nullptr, const_cast<char**>(argv), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe_ends[1]);
  *out = pipe_ends[0];
  return child;
}

fs::path child_folder() {
  const char* folder = std::getenv("COHORT_CRASH_FOLDER");
  return folder == nullptr ? "" : folder;
}

TEST(CrashChild, DISABLED_SavesForEver) {
  RunCheckpoints checkpoints(child_folder(), {.keep = 2});
  for (int64_t i = 1; i < 100'000; ++i) {
    // One name in three is saved again, so that replacing is killed too.
    checkpoints.save("step_" + std::to_string(i / 3 * 3), large_content_of(i), {.is_best = i % 4 == 0});
    if (::write(3, &i, sizeof i) != sizeof i) break;
  }
}

TEST(CrashChild, DISABLED_SavesBeyondTheFileSizeLimit) {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{kNumel * 4, kNumel * 4};  // half of a file; root has no privilege over it
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  RunCheckpoints checkpoints(child_folder());
  COHORT_EXPECT_THROW_WITH(checkpoints.save("step_2", large_content_of(2)), SystemError,
                           "model.safetensors: File too large");
  COHORT_EXPECT_THROW_WITH(checkpoints.save("step_2", large_content_of(2)), SystemError, "(needs 1600");
  COHORT_EXPECT_THROW_WITH(checkpoints.save("step_2", large_content_of(2)), SystemError, "Try: free space");
}

TEST(CrashTest, NoSpaceLeftIsNamedAndThePreviousCheckpointSurvives) {
  test::TempDir dir;
  RunCheckpoints(dir.path()).save("step_1", large_content_of(1));
  int out = -1;
  const pid_t child = start_child("SavesBeyondTheFileSizeLimit", dir.path(), &out);
  int status = -1;
  ::waitpid(child, &status, 0);
  ::close(out);
  EXPECT_EQ(status, 0);
  expect_whole(dir / "last");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}),
            3);  // step_1, last and .lock: no temporary
}

void kill_and_check(std::mt19937& random) {
  test::TempDir dir;
  int out = -1;
  const pid_t child = start_child("SavesForEver", dir.path(), &out);
  int64_t saved = 0;
  ASSERT_EQ(::read(out, &saved, sizeof saved), static_cast<ssize_t>(sizeof saved));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 80'000));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  while (::read(out, &saved, sizeof saved) == static_cast<ssize_t>(sizeof saved)) {
  }
  ::close(out);

  const RunCheckpoints checkpoints(dir.path());
  const auto usable = checkpoints.find("auto");
  ASSERT_TRUE(usable.has_value());
  EXPECT_EQ(*usable, *checkpoints.find("last"));
  checkpoints.go_back_to(*usable);
  EXPECT_GE(RunCheckpoints::load(*usable).state["value"].get<int64_t>(), saved);
  for (const auto& item : fs::directory_iterator(dir.path())) {
    if (item.path().filename() == ".lock") continue;
    EXPECT_NE(item.path().filename().string()[0], '.') << "left behind: " << item.path();
    expect_whole(item.path());
  }
}

TEST(CrashTest, KilledAtAnyMomentThePreviousOrTheNewCheckpointIsWhole) {
  const char* repeat = std::getenv("COHORT_SLOW_REPEAT");
  const int times = repeat == nullptr ? 1 : std::atoi(repeat);
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << ", " << times << " kills\n";
  std::mt19937 random(seed);
  for (int i = 0; i < times && !HasFatalFailure(); ++i) kill_and_check(random);
}

}  // namespace
}  // namespace cohort::checkpoint
