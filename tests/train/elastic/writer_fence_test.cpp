#include "cohort/train/internal/elastic/writer_fence.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <stdexcept>

#include "cohort/base/error.h"
#include "cohort/elastic/session.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

TEST(WriterFenceTest, AnEarlierGenerationWritesNoMore) {
  const test::TempDir dir;
  WriterFence first(dir.path()), second(dir.path());
  int writes = 0;
  const auto write = [&] { ++writes; };
  EXPECT_TRUE(first.write(3, write));
  EXPECT_TRUE(first.write(3, [&] { EXPECT_TRUE(first.write(3, write)) << "within another one"; }));
  EXPECT_TRUE(second.write(4, write));
  COHORT_EXPECT_THROW_WITH(first.write(3, write), elastic::GenerationEnded,
                           "generation 4 has written to the run's folder, and this process is in 3");
  EXPECT_EQ(writes, 3);
  EXPECT_TRUE(first.write(5, write));
  EXPECT_THROW(second.write(5, [] { throw std::runtime_error("disk"); }), std::runtime_error);
  EXPECT_TRUE(first.write(5, write)) << "what throws holds no lock";
}

TEST(WriterFenceTest, AJobCountsItsGenerationsFromOne) {
  const test::TempDir dir;
  WriterFence fence(dir / "run");
  EXPECT_TRUE(fence.write(123, [] {}));
  fence.begin(1);
  EXPECT_TRUE(fence.write(1, [] {}));
  EXPECT_EQ(test::read_file(dir / "run" / ".writer"), "1\n");
}

TEST(WriterFenceTest, AProcessThatIsStoppedWhileItWritesIsWaitedForAWhile) {
  const test::TempDir dir;
  WriterFence fence(dir.path());
  const int stopped = ::open((dir / ".writer").c_str(), O_RDWR);
  ASSERT_EQ(::flock(stopped, LOCK_EX), 0);
  bool is_written = false;
  EXPECT_FALSE(fence.write(1, [&] { is_written = true; }));
  EXPECT_FALSE(is_written);
  ::close(stopped);
  EXPECT_TRUE(fence.write(1, [&] { is_written = true; }));
  EXPECT_TRUE(is_written);
}

TEST(WriterFenceTest, AFolderThatCannotBeMadeIsAnError) {
  COHORT_EXPECT_THROW_WITH(WriterFence("/dev/null/run"), SystemError, "cannot open /dev/null/run/.writer");
}

}  // namespace
}  // namespace cohort::train
