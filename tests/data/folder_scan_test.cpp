#include "cohort/data/folder_scan.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"
#include "cohort/data/encoded_cache.h"
#include "cohort/data/file_bytes.h"
#include "tests/data/folder_calls.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;

TEST(FolderScanTest, OrdersAsTorchvisionsImageFolder) {
  // What torchvision.datasets.ImageFolder lists for these files (tests/golden/data_image_folder.py prints
  // it).
  const test::TempDir dir;
  for (const char* name : {"b/x.png", "b/10.jpg", "b/9.JPG", "a/sub/1.jpeg", "a/sub-2/0.jpg", "a/z.jpg",
                           "a/sub/deep/q.jpg", "B/y.jpg", "b/notes.txt", "loose.jpg", "\xc3\xa4/u.jpg"}) {
    test::write_file(dir / name, "");
  }
  const FolderIndex index = scan_image_folder(dir.path().string() + "/");
  EXPECT_EQ(index.classes(), (std::vector<std::string>{"B", "a", "b", "\xc3\xa4"}));
  const std::vector<std::pair<std::string, int>> expected = {
      {"B/y.jpg", 0},  {"a/z.jpg", 1}, {"a/sub/1.jpeg", 1}, {"a/sub-2/0.jpg", 1}, {"a/sub/deep/q.jpg", 1},
      {"b/10.jpg", 2}, {"b/9.JPG", 2}, {"b/x.png", 2},      {"\xc3\xa4/u.jpg", 3}};
  std::vector<std::pair<std::string, int>> got;
  for (std::int64_t i = 0; i < index.size(); ++i) got.emplace_back(index.name(i), index.label(i));
  // '-' sorts before '/', so the folder sub-2 comes before sub/deep and after sub.
  EXPECT_EQ(got, expected);
  EXPECT_EQ(index.path(0), dir.path().string() + "/B/y.jpg");
}

TEST(FolderScanTest, AnEmptyClassIsNamed) {
  const test::TempDir dir;
  test::write_file(dir / "cat/1.jpg", "");
  test::write_file(dir / "dog/readme.webp", "");
  const std::string root = dir.path().string();
  COHORT_EXPECT_THROW_WITH(scan_image_folder(root), DataError,
                           "class 'dog' has no image (.jpg, .jpeg, .png) among 1 files such as readme.webp");
  const FolderIndex index = scan_image_folder(root, {.allow_empty = true});
  EXPECT_EQ(index.size(), 1);
  EXPECT_EQ(index.classes().size(), 2U);
}

TEST(FolderScanTest, FilesThatAreNoImagesAreCountedAndNamedOnce) {
  const test::TempDir dir;
  for (const char* name : {"cat/1.jpg", "cat/2.webp", "cat/sub/3.WEBP", "dog/1.png", "dog/1.bmp",
                           "dog/README", "dog/.DS_Store", "loose.jpg"}) {
    test::write_file(dir / name, "");
  }
  fs::create_symlink(dir / "gone.jpg", dir / "dog/2.jpg");
  const std::string root = dir.path().string();
  std::vector<std::string> lines;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { lines.emplace_back(line); });
  for (int i = 0; i < 2; ++i) EXPECT_EQ(scan_image_folder(root).size(), 2);
  base::set_log_sink({});
  ASSERT_EQ(lines.size(), 1U);
  const std::string what =
      root +
      ": 6 files are passed over, images are .jpg, .jpeg and .png: 2 .webp (such as cat/2.webp), 1 .bmp "
      "(such as dog/1.bmp), 1 dangling links (such as dog/2.jpg), 1 outside the class folders (such as "
      "loose.jpg), 1 without an ending (such as dog/README)";
  EXPECT_TRUE(test::message_contains(lines[0], what));
  const FolderScanOptions reject{.on_other_files = OnOtherFiles::kRaise};
  COHORT_EXPECT_THROW_WITH(scan_image_folder(root, reject), DataError, what);
  // The tools count without a word in the log.
  const FolderIndex quiet = scan_image_folder(root, {.on_other_files = OnOtherFiles::kIgnore});
  EXPECT_EQ(quiet.other_files().size(), 5U);
  EXPECT_EQ(quiet.other_files()[0].count, 2);

  const test::TempDir clean;
  test::write_file(clean / "cat/1.jpg", "");
  test::write_file(clean / "cat/.hidden", "");
  EXPECT_EQ(scan_image_folder(clean.path().string(), reject).explain_other_files(), "");
}

TEST(FolderScanTest, ACallThatFailsIsAnErrorAndNotTheEndOfTheFolder) {
  const test::TempDir dir;
  for (const char* name : {"cat/1.jpg", "cat/2.jpg", "cat/sub/3.jpg", "dog/1.jpg"})
    test::write_file(dir / name, "");
  fs::create_symlink(dir / "cat/1.jpg", dir / "dog/link.jpg");
  const std::string root = dir.path().string();
  for (const int error : {EIO, ESTALE, EACCES}) {
    int call = 0;
    for (bool failed = true; failed; ++call) {
      SCOPED_TRACE(call);
      test::fail_folder_call(call, error);
      failed = false;
      try {
        EXPECT_EQ(scan_image_folder(root, {.allow_empty = true}).size(), 5);
      } catch (const DataError& rejected) {
        failed = true;
        EXPECT_TRUE(test::message_contains(rejected.what(), std::strerror(error)));
      }
      test::fail_folder_call(-1, 0);
    }
    EXPECT_GE(call, 4 + 4 * 3 + 6 + 1);  // four folders, what is in them, and a link
  }
}

TEST(FolderScanTest, WhatIsNeitherFileNorFolderIsCounted) {
  const test::TempDir dir;
  test::write_file(dir / "cat/1.jpg", "");
  ASSERT_EQ(::mkfifo((dir / "cat/x.png").c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", dir / "cat/zero.jpg");
  fs::create_symlink(dir / "cat/1.jpg/none", dir / "cat/y.jpg");
  COHORT_EXPECT_THROW_WITH(
      scan_image_folder(dir.path().string(), {.on_other_files = OnOtherFiles::kRaise}), DataError,
      "4 files are passed over, images are .jpg, .jpeg and .png: 3 pipes, sockets or devices (such as pipe), "
      "1 dangling links (such as cat/y.jpg)");
}

TEST(FolderScanTest, NoMoreThanFiveKindsOfOtherFilesAreNamed) {
  const test::TempDir dir;
  test::write_file(dir / "a/1.jpg", "");
  for (const char* ending : {"1", "2", "3", "4", "5", "6", "7"})
    test::write_file(dir / (std::string("a/x.") + ending), "");
  const std::string text =
      scan_image_folder(dir.path().string(), {.on_other_files = OnOtherFiles::kIgnore}).explain_other_files();
  EXPECT_TRUE(test::message_contains(text, "7 files are passed over"));
  EXPECT_TRUE(test::message_contains(text, "1 .5 (such as a/x.5), ..."));
  EXPECT_EQ(text.find("x.6"), std::string::npos);
}

TEST(FolderScanTest, AMissingFolderAndOneWithoutClassesAreErrors) {
  const test::TempDir dir;
  COHORT_EXPECT_THROW_WITH(scan_image_folder((dir / "none").string()), DataError,
                           "none: No such file or directory");
  test::write_file(dir / "1.jpg", "");
  COHORT_EXPECT_THROW_WITH(scan_image_folder(dir.path().string()), DataError, "has no class folders");
}

TEST(FolderScanTest, FollowsLinksButNotForEver) {
  const test::TempDir dir;
  test::write_file(dir / "real/1.jpg", "");
  fs::create_directories(dir / "set/cat");
  fs::create_directory_symlink(dir / "real", dir / "set/cat/more");
  EXPECT_STREQ(scan_image_folder((dir / "set").string()).name(0), "cat/more/1.jpg");
  fs::create_directory_symlink(dir / "set/cat", dir / "set/cat/again");
  COHORT_EXPECT_THROW_WITH(scan_image_folder((dir / "set").string()), DataError, "again");
}

TEST(FileBytesTest, ReadsFilesLargerThanTheBuffer) {
  const test::TempDir dir;
  std::vector<std::byte> buffer;
  for (const std::size_t size : {0, 1, 65535, 65536, 65537, 300000}) {
    std::string content(size, 'x');
    if (size > 0) content.back() = 'y';
    test::write_file(dir / "f", content);
    const auto bytes = read_file_bytes((dir / "f").string(), buffer);
    ASSERT_EQ(bytes.size(), size);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), std::as_bytes(std::span(content)).begin()));
  }
  COHORT_EXPECT_THROW_WITH(read_file_bytes(dir.path().string(), buffer), DataError, "cannot read");
}

TEST(FileBytesTest, AShortReadIsNotTheEnd) {
  // Each read of a pipe in packet mode gives one packet, as a file of FUSE may give less than was asked for.
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_DIRECT | O_CLOEXEC), 0);
  const base::Fd end(pipe[0]);
  base::Fd start(pipe[1]);
  const std::string content(300, 'x');
  for (int i = 0; i < 5; ++i) ASSERT_EQ(::write(start.get(), content.data(), content.size()), 300);
  start.close();
  std::vector<std::byte> buffer;
  EXPECT_EQ(read_file_bytes(base::concat("/proc/self/fd/", end.get()), buffer).size(), 1500U);
}

TEST(FileBytesTest, TheBufferFollowsTheSizeOfALargeFile) {
  const test::TempDir dir;
  test::write_file(dir / "f", "");
  fs::resize_file(dir / "f", 40 << 20);
  std::vector<std::byte> buffer;
  EXPECT_EQ(read_file_bytes((dir / "f").string(), buffer).size(), std::size_t{40} << 20);
  EXPECT_LE(buffer.size(), (std::size_t{40} << 20) + 1);
}

TEST(EncodedCacheTest, KeepsFilesUntilItIsFull) {
  EncodedCache cache(3, 64);
  const std::string a(20, 'a'), b(40, 'b'), c(10, 'c');
  EXPECT_FALSE(cache.find(0).has_value());
  cache.store(0, std::as_bytes(std::span(a)));
  cache.store(1, std::as_bytes(std::span(b)));  // does not fit
  cache.store(2, std::as_bytes(std::span(c)));
  ASSERT_TRUE(cache.find(0).has_value());
  EXPECT_EQ(cache.find(0)->size(), 20U);
  EXPECT_FALSE(cache.find(1).has_value());
  ASSERT_TRUE(cache.find(2).has_value());
  EXPECT_EQ(std::to_integer<char>((*cache.find(2))[9]), 'c');
  EXPECT_LE(cache.bytes_used(), 64);
}

}  // namespace
}  // namespace cohort::data
