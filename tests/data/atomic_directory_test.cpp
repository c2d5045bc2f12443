#include "cohort/data/internal/atomic_directory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <iterator>

#include "cohort/base/error.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;

TEST(AtomicDirectoryTest, WhatIsNotItsOwnIsLeftAlone) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  test::write_file(out + ".partial/notes.txt", "mine");
  COHORT_EXPECT_THROW_WITH(AtomicDirectory{out}, DataError,
                           "out.partial exists: it was not made by `cohort data`");
  EXPECT_EQ(test::read_file(out + ".partial/notes.txt"), "mine");
  fs::remove_all(out + ".partial");
  test::write_file(out + ".partial", "a file");
  COHORT_EXPECT_THROW_WITH(AtomicDirectory{out}, DataError, "was not made by");
  EXPECT_EQ(test::read_file(out + ".partial"), "a file");
}

TEST(AtomicDirectoryTest, WhatAnotherProcessWritesIsLeftAlone) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  AtomicDirectory first(out);
  test::write_file(first.path() / "1.jpg", "one");
  COHORT_EXPECT_THROW_WITH(AtomicDirectory{out}, DataError,
                           "out.partial exists: another process is writing it");
  first.finish();
  EXPECT_EQ(test::read_file(out + "/1.jpg"), "one");
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 1);
}

TEST(AtomicDirectoryTest, WhatAKilledProcessLeftIsRemoved) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto* killed = new AtomicDirectory(out);
    test::write_file(killed->path() / "half.jpg", "ha");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(fs::exists(out + ".partial/files/half.jpg"));
  AtomicDirectory(out).finish();
  EXPECT_TRUE(fs::is_empty(out));
}

// Runs `act` in a child that is killed at that moment; false if the child came to its end.
bool kill_during(const std::function<void()>& act, int moment) {
  const pid_t child = ::fork();
  if (child == 0) {
    test::kill_at_file_call(moment);
    act();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

TEST(AtomicDirectoryTest, KilledAtEachSystemCallLeavesAllOrNothingAndIsClearedAway) {
  const auto make = [](const std::string& out) {
    AtomicDirectory folder(out);
    test::write_file(folder.path() / "1.jpg", "one");
    test::write_file(folder.path() / "a/2.jpg", "two");
    folder.finish();
  };
  const auto give_up = [](const std::string& out) {
    const AtomicDirectory folder(out);
    test::write_file(folder.path() / "1.jpg", "one");
  };
  for (const bool gives_up : {false, true}) {
    for (int moment = 0;; ++moment) {
      SCOPED_TRACE(base::concat(gives_up ? "giving up" : "finishing", ", moment ", moment));
      const test::TempDir dir;
      const std::string out = (dir / "out").string();
      // The second child also clears away what the first has left.
      ASSERT_TRUE(kill_during([&] { make(out); }, 3));
      const bool killed = kill_during([&] { gives_up ? give_up(out) : make(out); }, moment);
      if (fs::exists(out)) {
        EXPECT_EQ(test::read_file(out + "/1.jpg") + test::read_file(out + "/a/2.jpg"), "onetwo");
        fs::remove_all(out);
      } else {
        EXPECT_TRUE(killed || gives_up);
      }
      ASSERT_NO_THROW(make(out));
      EXPECT_FALSE(fs::exists(out + ".partial"));
      EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 2);
      if (!killed) break;
      ASSERT_LT(moment, 100);
    }
  }
}

TEST(AtomicDirectoryTest, ALinkIsLeftAlone) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  test::write_file(dir / "mine/.cohort-data", "");
  test::write_file(dir / "mine/notes.txt", "mine");
  fs::create_directory_symlink(dir / "mine", out + ".partial");
  COHORT_EXPECT_THROW_WITH(AtomicDirectory{out}, DataError, "was not made by");
  EXPECT_EQ(test::read_file(dir / "mine/notes.txt"), "mine");
}

}  // namespace
}  // namespace cohort::data
