#include "cohort/elastic/writer_fence.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/elastic/session.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

TEST(WriterFenceTest, AnEarlierGenerationWritesNoMore) {
  const test::TempDir dir;
  WriterFence first(dir.path()), second(dir.path());
  int writes = 0;
  const auto write = [&] { ++writes; };
  EXPECT_TRUE(first.write(3, write));
  EXPECT_TRUE(first.write(3, [&] { EXPECT_TRUE(first.write(3, write)) << "within another one"; }));
  EXPECT_TRUE(second.write(4, write));
  COHORT_EXPECT_THROW_WITH(first.write(3, write), GenerationEnded,
                           "generation 4 has written to the run's folder, and this process is in 3");
  EXPECT_EQ(writes, 3);
  EXPECT_TRUE(first.write(5, write));
  EXPECT_THROW(second.write(5, [] { throw std::runtime_error("disk"); }), std::runtime_error);
  EXPECT_TRUE(first.write(5, write)) << "what throws holds no lock";
}

TEST(WriterFenceTest, ARunCountsItsGenerationsFromOne) {
  const test::TempDir dir;
  {
    WriterFence fence(dir / "run");
    fence.claim("first");
    EXPECT_TRUE(fence.write(123, [] {}));
  }
  WriterFence fence(dir / "run"), successor(dir / "run");
  fence.claim("the second");
  successor.claim("the second");
  EXPECT_TRUE(fence.write(1, [] {}));
  EXPECT_EQ(test::read_file(dir / "run" / ".writer"), "00000000000000000001 the second");
  EXPECT_TRUE(successor.write(2, [] {}));
  EXPECT_THROW(fence.write(1, [] {}), elastic::GenerationEnded);
}

TEST(WriterFenceTest, AProcessThatHasClaimedNothingClaimsWithItsFirstWrite) {
  const test::TempDir dir;
  WriterFence first(dir.path()), late(dir.path());
  first.claim("run");
  EXPECT_TRUE(first.write(1, [] {}));
  COHORT_EXPECT_THROW_WITH(late.write(2, [] {}), SystemError, "another elastic run has begun");
  EXPECT_TRUE(late.write(GenerationInfo{.generation = 2, .origin = "run"}, [] {}));
  EXPECT_THROW(first.write(1, [] {}), elastic::GenerationEnded);
}

TEST(WriterFenceTest, AFolderWhoseFileIsOfAnEarlierVersionIsTaken) {
  const test::TempDir dir;
  test::write_file(dir / ".writer", "123\n");
  WriterFence fence(dir.path());
  fence.claim("run");
  EXPECT_TRUE(fence.write(1, [] {}));
}

TEST(WriterFenceTest, WhileAProcessOfARunLivesNoOtherRunGetsTheFolder) {
  const test::TempDir dir;
  auto first = std::make_unique<WriterFence>(dir.path()), second = std::make_unique<WriterFence>(dir.path());
  first->claim("a");
  second->claim("a");
  first.reset();
  WriterFence late(dir.path());
  COHORT_EXPECT_THROW_WITH(late.claim("b"), SystemError, " is in use by another elastic run");
  bool is_written = false;
  EXPECT_TRUE(second->write(7, [&] { is_written = true; }));
  second.reset();
  late.claim("b");
  EXPECT_TRUE(late.write(1, [] {}));
}

TEST(WriterFenceTest, ProcessesThatBeginTogetherClaimTheFolderForOneRun) {
  const test::TempDir dir;
  test::write_file(dir / ".origin", "an earlier run");
  std::vector<std::unique_ptr<WriterFence>> fences(8);
  std::vector<std::thread> threads;
  std::atomic<int> num_claims = 0;
  for (std::size_t i = 0; i < fences.size(); ++i) {
    threads.emplace_back([&, i] {
      fences[i] = std::make_unique<WriterFence>(dir.path());
      fences[i]->claim("run");
      ++num_claims;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_claims, 8);
  EXPECT_EQ(test::read_file(dir / ".origin"), "run");
}

// A file system without locks lets another run in. Here the test writes what the other run would.
TEST(WriterFenceTest, AProcessOfAnEarlierRunEndsWhereAnotherRunHasTheFolder) {
  const test::TempDir dir;
  WriterFence stopped(dir.path());
  stopped.claim("a");
  EXPECT_TRUE(stopped.write(7, [] {}));
  test::write_file(dir / ".origin", "b");
  test::write_file(dir / ".writer", "00000000000000000001 b");
  bool is_written = false;
  COHORT_EXPECT_THROW_WITH(stopped.write(8, [&] { is_written = true; }), SystemError,
                           "and this process is of an earlier one");
  EXPECT_FALSE(is_written);
  EXPECT_EQ(test::read_file(dir / ".writer"), "00000000000000000001 b");
}

TEST(WriterFenceTest, AFileThatCannotBeReadIsAnErrorAndNotEmpty) {
  const test::TempDir dir;
  std::filesystem::create_directory(dir / "run");
  std::filesystem::create_directory(dir / "run" / ".writer");
  COHORT_EXPECT_THROW_WITH(WriterFence(dir / "run"), SystemError, ".writer cannot be opened: Is a directory");
}

TEST(WriterFenceTest, AProcessThatIsStoppedWhileItWritesIsWaitedForAWhile) {
  const test::TempDir dir;
  WriterFence fence(dir.path());
  const int stopped = ::open((dir / ".writer").c_str(), O_RDWR);
  ASSERT_EQ(::flock(stopped, LOCK_EX), 0);
  bool is_written = false;
  EXPECT_FALSE(fence.write(1, [&] { is_written = true; }));
  EXPECT_FALSE(is_written);
  // A run of a thousand steps must not wait for each of them.
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(fence.write(1, [&] { is_written = true; }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(100));
  ::close(stopped);
  EXPECT_TRUE(fence.write(1, [&] { is_written = true; }));
  EXPECT_TRUE(is_written);
}

TEST(WriterFenceTest, AFolderThatCannotBeMadeIsAnError) {
  COHORT_EXPECT_THROW_WITH(WriterFence("/dev/null/run"), SystemError,
                           "/dev/null/run/.origin cannot be opened: ");
}

}  // namespace
}  // namespace cohort::elastic
