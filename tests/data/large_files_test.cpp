// Files above 4 GiB, nearly all of it a hole; those that are read or unpacked whole are as large under label
// slow.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "cohort/data/dataset_tools.h"
#include "cohort/data/idx.h"
#include "cohort/data/tar_reader.h"
#include "tests/support/file_with_hole.h"
#include "tests/support/temp_dir.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;

// The block before a file of a plain tar (ustar), by hand: libarchive would have to write the file too.
std::string ustar_header(const std::string& name, std::uint64_t size) {
  std::string block(512, '\0');
  const auto put = [&](std::size_t at, const std::string& text) { block.replace(at, text.size(), text); };
  const auto octal = [](std::uint64_t value, int digits) {
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "%0*llo", digits, static_cast<unsigned long long>(value));
    return std::string(text.data());
  };
  put(0, name);
  put(100, "0000644");
  put(124, octal(size, 11));
  put(136, octal(0, 11));
  put(148, "        ");  // the sum is made with spaces in its own place
  put(156, "0");
  put(257, "ustar");
  put(263, "00");
  unsigned sum = 0;
  for (const char c : block) sum += static_cast<unsigned char>(c);
  put(148, octal(sum, 6) + std::string(1, '\0'));
  return block;
}

/// A file of `size` bytes, all of them 0 but for "end", and a small one.
void write_tar(const fs::path& path, std::uint64_t size) {
  std::string tail = "end" + ustar_header("dog/2.jpg", 5) + "three";
  tail.resize(tail.size() + 507 + 1024);  // the rest of its block, and two of zeros: the end
  test::write_file_with_hole(path, ustar_header("cat/1.jpg", size), size - 3, tail);
}

TEST(LargeFilesTest, WhatComesAfterALargeFileOfATarIsFound) {
  const test::TempDir dir;
  write_tar(dir / "large.tar", (std::uint64_t{1} << 32) + 1024);
  TarReader reader((dir / "large.tar").string(), {});
  EXPECT_EQ(reader.next()->path, "cat/1.jpg");
  EXPECT_EQ(reader.next()->path, "dog/2.jpg");
  std::string text;
  reader.read_content([&](std::int64_t offset, std::span<const std::byte> bytes) {
    EXPECT_EQ(offset, static_cast<std::int64_t>(text.size()));
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  EXPECT_EQ(text, "three");
  EXPECT_FALSE(reader.next().has_value());
}

TEST(LargeFilesTest, ATarIsUnpacked) {
  const test::TempDir dir;
  const std::uint64_t size = test::large_size() + 1024;
  write_tar(dir / "large.tar", size);
  const fs::path out = dir / "out";
  const GeneratedFolder made = unpack_tar((dir / "large.tar").string(), out.string(), {});
  EXPECT_EQ(made.files, 2);
  EXPECT_EQ(made.bytes, static_cast<std::int64_t>(size) + 5);
  EXPECT_EQ(fs::file_size(out / "cat/1.jpg"), size);
  std::ifstream large(out / "cat/1.jpg", std::ios::binary);
  large.seekg(-4, std::ios::end);
  std::string end(4, 'x');
  large.read(end.data(), 4);
  EXPECT_EQ(end, std::string("\0end", 4));
  EXPECT_EQ(test::read_file(out / "dog/2.jpg"), "three");
}

TEST(LargeFilesTest, AnIdxFileIsRead) {
  const test::TempDir dir;
  const auto images = static_cast<std::uint32_t>(test::large_size() >> 10) + 1;  // of 1 KiB
  std::string header("\0\0\x08\3\0\0\0\0\0\0\0\x20\0\0\0\x20", 16);
  for (int i = 0; i < 4; ++i)
    header[static_cast<std::size_t>(4 + i)] = static_cast<char>(images >> (24 - 8 * i));
  test::write_file_with_hole(dir / "large", header, (std::uint64_t{images} << 10) - 3, "end");
  const IdxArray array = read_idx((dir / "large").string());
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{images, 32, 32}));
  ASSERT_EQ(array.bytes.size(), std::uint64_t{images} << 10);
  EXPECT_EQ(std::memcmp(&array.bytes[array.bytes.size() - 4], "\0end", 4), 0);
}

}  // namespace
}  // namespace cohort::data
