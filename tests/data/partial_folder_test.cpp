#include "cohort/data/partial_folder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iterator>

#include "cohort/core/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;

TEST(PartialFolderTest, WhatIsNotItsOwnIsLeftAlone) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  test::write_file(out + ".partial/notes.txt", "mine");
  COHORT_EXPECT_THROW_WITH(PartialFolder{out}, DataError,
                           "out.partial exists: it was not made by `cohort data`");
  EXPECT_EQ(test::read_file(out + ".partial/notes.txt"), "mine");
  fs::remove_all(out + ".partial");
  test::write_file(out + ".partial", "a file");
  COHORT_EXPECT_THROW_WITH(PartialFolder{out}, DataError, "was not made by");
  EXPECT_EQ(test::read_file(out + ".partial"), "a file");
}

TEST(PartialFolderTest, WhatAnotherProcessWritesIsLeftAlone) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  PartialFolder first(out);
  test::write_file(first.path() / "1.jpg", "one");
  COHORT_EXPECT_THROW_WITH(PartialFolder{out}, DataError,
                           "out.partial exists: another process is writing it");
  first.finish();
  EXPECT_EQ(test::read_file(out + "/1.jpg"), "one");
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 1);
}

TEST(PartialFolderTest, WhatAKilledProcessLeftIsRemoved) {
  const test::TempDir dir;
  const std::string out = (dir / "out").string();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto* killed = new PartialFolder(out);
    test::write_file(killed->path() / "half.jpg", "ha");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(fs::exists(out + ".partial/half.jpg"));
  PartialFolder(out).finish();
  EXPECT_TRUE(fs::is_empty(out));
}

}  // namespace
}  // namespace cohort::data
