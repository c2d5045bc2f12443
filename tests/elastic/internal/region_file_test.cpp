#include "cohort/elastic/internal/region_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"
#include "cohort/base/internal/fault_points.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using Phase = CommitWord::Phase;

base::Fd duplicate(const base::Fd& file) {
  return base::Fd(::fcntl(file.get(), F_DUPFD_CLOEXEC, 3));
}

std::span<const std::byte> bytes_of_text(const std::string& text) {
  return std::as_bytes(std::span(text));
}

void commit_text(RegionFile& region, std::uint64_t steps, const std::string& text) {
  const std::size_t half = text.size() / 2;
  const std::array<std::span<const std::byte>, 3> parts{
      bytes_of_text(text).first(half), {}, bytes_of_text(text).subspan(half)};
  region.commit(steps, parts);
}

std::string text_of(const RegionFile& region) {
  const auto record = region.record();
  return record ? std::string(reinterpret_cast<const char*>(record->data()), record->size()) : "none";
}

std::uint64_t blocks_of(const base::Fd& file) {
  struct stat status {};
  EXPECT_EQ(::fstat(file.get(), &status), 0);
  return static_cast<std::uint64_t>(status.st_blocks);
}

// Runs `body` in a process of its own. Returns its wait status.
int run_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      body();
    } catch (const Error& error) {
      ::_exit(std::strstr(error.what(), "process ") != nullptr ? 2 : 3);
    }
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(RegionFileTest, ARecordOutlivesTheOneWhoWroteIt) {
  const base::Fd file = base::make_memory_file("test");
  EXPECT_EQ(read_commit_word(file), CommitWord{});
  {
    RegionFile region(duplicate(file));
    EXPECT_EQ(region.word(), CommitWord{});
    EXPECT_EQ(text_of(region), "none");
    commit_text(region, 5, "five");
    commit_text(region, 6, std::string(200'000, 'x'));
  }
  EXPECT_EQ(read_commit_word(file), (CommitWord{Phase::kCommitted, 6}));
  RegionFile region(duplicate(file));
  EXPECT_EQ(text_of(region), std::string(200'000, 'x'));
  region.mark_changing(7);
  EXPECT_EQ(region.word(), (CommitWord{Phase::kChanging, 7}));
  EXPECT_EQ(text_of(region), "none");
  commit_text(region, 7, "");
  EXPECT_EQ(text_of(region), "");
  region.mark_empty();
  EXPECT_EQ(read_commit_word(file), CommitWord{});
}

TEST(RegionFileTest, OneProcessHasItUntilItDies) {
  const base::Fd file = base::make_memory_file("test");
  {
    const RegionFile region(duplicate(file));
    EXPECT_EQ(run_child([&] { RegionFile other(duplicate(file)); }), 2 << 8);
  }
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RegionFile region(duplicate(file));
    static_cast<void>(::write(ready[1], "r", 1));
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  COHORT_EXPECT_THROW_WITH(RegionFile(duplicate(file), std::chrono::milliseconds(20)), SystemError,
                           base::concat("process ", child, " has the memory"));
  // It is ending while its successor begins.
  std::thread killer([child] { ::kill(child, SIGKILL); });
  const RegionFile region(duplicate(file), std::chrono::seconds(20));
  killer.join();
  ::waitpid(child, nullptr, 0);
  for (const int end : ready) ::close(end);
}

// A process that makes steps is killed at each of its points. The word that it leaves is true.
TEST(RegionFileTest, AKillLeavesAWholeRecordOrNone) {
  std::mt19937_64 random(17);
  int num_whole = 0;
  for (int point = 1; point <= 60; ++point) {
    const base::Fd file = base::make_memory_file("test");
    std::vector<std::string> texts;
    for (int i = 0; i < 12; ++i) {
      texts.emplace_back(random() % (i % 4 == 3 ? 300'000 : 3'000), static_cast<char>('a' + i));
    }
    const int status = run_child([&] {
      base::set_fault_hook([left = point](const char*) mutable {
        if (--left == 0) ::kill(::getpid(), SIGKILL);
      });
      RegionFile region(duplicate(file));
      for (std::size_t i = 0; i < texts.size(); ++i) {
        // As where a process holds what it has copied: the state does not change meanwhile.
        if (i % 3 != 2) region.mark_changing(i);
        commit_text(region, i, texts[i]);
      }
    });
    const bool was_killed = WIFSIGNALED(status);
    ASSERT_TRUE(was_killed || status == 0);
    const RegionFile region(duplicate(file));
    const CommitWord word = region.word();
    ASSERT_NE(word.phase, Phase::kEmpty);
    if (word.phase == Phase::kCommitted) {
      ASSERT_TRUE(text_of(region) == texts.at(word.steps)) << "point " << point;
      ++num_whole;
    } else {
      EXPECT_TRUE(was_killed);
      EXPECT_EQ(text_of(region), "none");
    }
  }
  EXPECT_GT(num_whole, 20);
}

TEST(RegionFileTest, OtherBytesAreNoRecord) {
  const base::Fd file = base::make_memory_file("test");
  RegionFile region(duplicate(file));
  commit_text(region, 1, std::string(5'000, 'x'));
  const auto* const byte = region.record()->data() + 4'000;
  *const_cast<std::byte*>(byte) = std::byte{'y'};
  EXPECT_EQ(text_of(region), "none");
  EXPECT_EQ(region.word(), (CommitWord{Phase::kCommitted, 1}));
}

TEST(RegionFileTest, AnyFileIsARegionOrBecomesOne) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 200; ++i) {
    const base::Fd file = base::make_memory_file("test");
    {
      RegionFile region(duplicate(file));
      commit_text(region, 3, std::string(100, 'x'));
    }
    // The header's place, sizes and all else.
    for (std::uint64_t k = 1 + random() % 5; k > 0; --k) {
      const std::uint64_t value = random() % 3 == 0 ? random() : random() % 100'000;
      ASSERT_EQ(::pwrite(file.get(), &value, sizeof value, static_cast<off_t>(random() % 100)), 8);
    }
    if (i % 5 == 0) ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(random() % 9'000)), 0);
    RegionFile region(duplicate(file));
    if (text_of(region) == "none") region.clear();
    region.mark_changing(4);
    commit_text(region, 4, "four");
    EXPECT_EQ(text_of(region), "four");
  }
}

TEST(RegionFileTest, MemoryThatIsDroppedIsGivenBack) {
  const base::Fd file = base::make_memory_file("test");
  RegionFile region(duplicate(file));
  constexpr std::uint64_t kBytes = 1 << 20;
  auto memory = region.allocate(kBytes);
  const std::uint64_t before = blocks_of(file);
  memory->reserve(0, kBytes);
  EXPECT_EQ(blocks_of(file), before + kBytes / 512);
  std::memset(memory->data(), 7, kBytes);
  const std::uint64_t offset = memory->offset();
  memory.reset();
  EXPECT_EQ(blocks_of(file), before + kBytes / 512) << "the next process may want it";
  memory = region.map(offset, kBytes);
  EXPECT_EQ(memory->data()[kBytes - 1], std::byte{7});
  memory->drop();
  EXPECT_EQ(memory->data()[kBytes - 1], std::byte{7});
  memory.reset();
  EXPECT_EQ(blocks_of(file), before);
  COHORT_EXPECT_THROW_WITH(region.map(offset, kBytes + 1), DataError, "is said to have bytes");
  region.clear();
  EXPECT_EQ(region.word(), CommitWord{});
}

TEST(RegionFileTest, NoMemoryIsAnError) {
  const base::Fd sealed = base::make_memory_file("test");
  RegionFile region(duplicate(sealed));
  commit_text(region, 1, "one");
  ASSERT_EQ(::fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  COHORT_EXPECT_THROW_WITH(region.allocate(1), SystemError, "there is no memory for the state");
  COHORT_EXPECT_THROW_WITH(commit_text(region, 2, std::string(1 << 20, 'x')), SystemError, "no memory");
  EXPECT_EQ(text_of(region), "one");
  // Where a limit of files would end the process by a signal.
  const base::Fd file = base::make_memory_file("test");
  const int status = run_child([&] {
    const rlimit limit{10'000, 10'000};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(9);
    RegionFile limited(duplicate(file));
    limited.allocate(20'000);
  });
  EXPECT_EQ(status, 3 << 8);
}

// From here on fallocate() fails, as in a container whose memory is full.
void fail_each_fallocate() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSPC),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    ::_exit(9);
  }
}

// A write to a hole would end the process by a signal where there is no memory.
TEST(RegionFileTest, WithoutMemoryForTheHeaderNothingIsWritten) {
  const base::Fd file = base::make_memory_file("test");
  EXPECT_EQ(run_child([&] {
              RegionFile region(duplicate(file));
              commit_text(region, 1, "one");
              fail_each_fallocate();
              try {
                region.clear();
                ::_exit(8);
              } catch (const SystemError&) {
                region.mark_empty();
              }
            }),
            0);
  EXPECT_EQ(blocks_of(file), 0U);
  // Nor does a successor touch the page.
  EXPECT_EQ(run_child([&] {
              fail_each_fallocate();
              RegionFile region(duplicate(file));
            }),
            3 << 8);
  EXPECT_EQ(blocks_of(file), 0U);
  RegionFile region(duplicate(file));
  commit_text(region, 2, "two");
  EXPECT_EQ(text_of(region), "two");
}

}  // namespace
}  // namespace cohort::elastic
