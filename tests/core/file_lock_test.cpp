#include "cohort/core/file_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <string>

#include "cohort/core/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::core {
namespace {

using test::TempDir;

TEST(FileLockTest, SecondHolderIsToldWhoTheFirstIs) {
  const TempDir dir;
  std::optional<FileLock> lock(std::in_place, dir / ".lock");
  COHORT_EXPECT_THROW_WITH(
      FileLock(dir / ".lock"), SystemError,
      dir.path().string() + " is in use by process " + std::to_string(::getpid()) + " on ");
  lock.reset();
  EXPECT_NO_THROW(FileLock(dir / ".lock"));
}

TEST(FileLockTest, FileThatCannotBeOpenedIsNamed) {
  const TempDir dir;
  COHORT_EXPECT_THROW_WITH(FileLock(dir / "no" / ".lock"), SystemError,
                           "cannot open " + (dir / "no").string());
}

TEST(FileLockTest, LockOfAKilledProcessIsFree) {
  const TempDir dir;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FileLock lock(dir / ".lock");
    [[maybe_unused]] const ssize_t written = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  COHORT_EXPECT_THROW_WITH(FileLock(dir / ".lock"), SystemError,
                           "in use by process " + std::to_string(child));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(FileLock(dir / ".lock"));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace cohort::core
