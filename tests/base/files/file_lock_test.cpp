#include "cohort/base/files/file_lock.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <optional>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace {
int flock_error = 0;  // what flock() of this program fails with; 0: it is the system's
}  // namespace

// In place of the C library's: the library under test calls this one.
extern "C" int flock(int file, int operation) {
  if (flock_error == 0) return static_cast<int>(::syscall(SYS_flock, file, operation));
  errno = flock_error;
  return -1;
}

namespace cohort::base {
namespace {

using test::TempDir;

TEST(FileLockTest, SharersKeepOutWhoWantsItAlone) {
  const TempDir dir;
  std::optional<FileLock> first(std::in_place, dir / ".lock", FileLock::Mode::kShared),
      second(std::in_place, dir / ".lock", FileLock::Mode::kShared);
  first.reset();
  COHORT_EXPECT_THROW_WITH(FileLock(dir / ".lock"), SystemError, "is in use by process");
  second.reset();
  const FileLock alone(dir / ".lock");
  COHORT_EXPECT_THROW_WITH(FileLock(dir / ".lock", FileLock::Mode::kShared), SystemError,
                           "is in use by process");
}

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

TEST(FileLockTest, FileSystemWithoutLocksIsAWarningForEachFolder) {
  for (const int error : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    const TempDir dir;
    std::string lines;
    set_log_sink([&](LogLevel, std::string_view line) { lines += std::string(line) + "\n"; });
    flock_error = error;
    {
      const FileLock lock(dir / ".lock");
      EXPECT_FALSE(lock.is_held());
      EXPECT_NO_THROW(FileLock(dir / ".lock"));
    }
    flock_error = 0;
    set_log_sink({});
    const std::string warning = dir.path().string() + " is on a file system without locks";
    ASSERT_NE(lines.find(warning), std::string::npos) << lines;
    EXPECT_EQ(lines.find(warning), lines.rfind(warning)) << lines;
    EXPECT_TRUE(FileLock(dir / ".lock").is_held());
  }
}

TEST(FileLockTest, AnotherErrorOfTheSystemIsSaid) {
  const TempDir dir;
  flock_error = EIO;
  COHORT_EXPECT_THROW_WITH(FileLock(dir / ".lock"), SystemError, "cannot lock " + (dir / ".lock").string());
  flock_error = 0;
}

}  // namespace
}  // namespace cohort::base
