#include "cohort/base/files/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;
using test::write_file;

std::size_t files_in(const TempDir& dir) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()));
}

TEST(AtomicFileTest, WritesAndReplacesAWholeFile) {
  const TempDir dir;
  write_file_atomically(dir / "a.json", "one");
  EXPECT_EQ(read_file(dir / "a.json"), "one");
  write_file_atomically(dir / "a.json", std::string("t\0wo", 4));
  EXPECT_EQ(read_file(dir / "a.json"), std::string("t\0wo", 4));
  EXPECT_EQ(files_in(dir), 1u);
}

TEST(AtomicFileTest, AppearsWhenCommittedAndNotBefore) {
  const TempDir dir;
  AtomicFile file(dir / "a");
  file.write("one ");
  file.write("two");
  EXPECT_FALSE(fs::exists(dir / "a"));
  file.commit();
  EXPECT_EQ(read_file(dir / "a"), "one two");
  COHORT_EXPECT_THROW_WITH(file.write("more"), UsageError, "is closed");
  COHORT_EXPECT_THROW_WITH(file.commit(), UsageError, "is closed");
}

TEST(AtomicFileTest, LeavesNothingBehindWithoutACommit) {
  const TempDir dir;
  write_file(dir / "a", "old");
  {
    AtomicFile file(dir / "a");
    file.write("new");
  }
  EXPECT_EQ(read_file(dir / "a"), "old");
  EXPECT_EQ(files_in(dir), 1u);
}

TEST(AtomicFileTest, TakesARelativeName) {
  const TempDir dir;
  const fs::path before = fs::current_path();
  fs::current_path(dir.path());
  write_file_atomically("a", "one");
  fs::current_path(before);
  EXPECT_EQ(read_file(dir / "a"), "one");
}

TEST(AtomicFileTest, MissingFolderIsNamed) {
  const TempDir dir;
  COHORT_EXPECT_THROW_WITH(write_file_atomically(dir / "no" / "a", "x"), SystemError,
                           "No such file or directory. Try: making the folder " + (dir / "no").string());
  COHORT_EXPECT_THROW_WITH(sync_folder(dir / "no"), SystemError, "cannot open folder");
}

// Every write to /dev/full fails as a full disk does; the temporary file is a link to it.
TEST(AtomicFileTest, FullDiskIsSaidWithFileAndBytesAndTheOldFileSurvives) {
  const TempDir dir;
  write_file(dir / "a", "old");
  for (int i = 0; i < 100; ++i) fs::create_symlink("/dev/full", dir / concat("a.tmp.", ::getpid(), ".", i));
  COHORT_EXPECT_THROW_WITH(
      write_file_atomically(dir / "a", std::string(1000, 'x')), SystemError,
      (dir / "a").string() + " (1000 bytes): No space left on device. Try: freeing space");
  EXPECT_EQ(read_file(dir / "a"), "old");
}

// Run in a child: the limit would hold for the rest of the tests.
void write_with_file_size_limit(const fs::path& path) {
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{4096, 4096};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  try {
    write_file_atomically(path, std::string(10000, 'x'));
  } catch (const SystemError& error) {
    const bool clean = read_file(path) == "old" && std::distance(fs::directory_iterator(path.parent_path()),
                                                                 fs::directory_iterator()) == 1;
    std::fprintf(stderr, "%s %s", clean ? "clean" : "not clean", error.what());
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST(AtomicFileDeathTest, FileThatStopsHalfwayLeavesTheOldOne) {
  GTEST_FLAG_SET(death_test_style, "fast");
  const TempDir dir;
  write_file(dir / "a", "old");
  EXPECT_EXIT(write_with_file_size_limit(dir / "a"), ::testing::ExitedWithCode(0),
              "^clean .*10000 bytes.: File too large. Try: freeing space");
}

TEST(AtomicFileTest, ManyThreadsMayWriteOneFile) {
  const TempDir dir;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i]() {
      for (int k = 0; k < 10; ++k)
        write_file_atomically(dir / "a", std::string(10000, static_cast<char>('a' + i)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string content = read_file(dir / "a");
  EXPECT_EQ(content, std::string(10000, content[0]));
  EXPECT_EQ(files_in(dir), 1u);
}

}  // namespace
}  // namespace cohort::base
