#include "cohort/base/files/read_at.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

#include "cohort/base/files/fd.h"
#include "tests/support/temp_dir.h"

namespace cohort::base {
namespace {

using test::TempDir;

TEST(ReadAtTest, ReadsFromAPlaceWhereverOthersHaveReadTo) {
  const TempDir dir;
  test::write_file(dir / "a", "0123456789");
  const Fd file(::open((dir / "a").c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(::lseek(file.get(), 7, SEEK_SET), 7);
  EXPECT_EQ(read_at(file.get(), 0, 4), "0123");
  EXPECT_EQ(read_at(file.get(), 3, 4), "3456");
  EXPECT_EQ(::lseek(file.get(), 0, SEEK_CUR), 7);
}

TEST(ReadAtTest, TellsTheEndFromAnError) {
  const TempDir dir;
  test::write_file(dir / "a", "0123456789");
  const Fd file(::open((dir / "a").c_str(), O_RDONLY | O_CLOEXEC));
  errno = EPERM;
  EXPECT_EQ(read_at(file.get(), 8, 4), "89");
  EXPECT_EQ(errno, 0);
  const Fd folder(::open(dir.path().c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(read_at(folder.get(), 0, 4), "");
  EXPECT_EQ(errno, EISDIR);
}

}  // namespace
}  // namespace cohort::base
