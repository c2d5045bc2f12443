#include "cohort/data/dataset_tools.h"

#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>

#include <clocale>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/file_bytes.h"
#include "cohort/data/folder_scan.h"
#include "tests/support/environment.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;

struct ArchiveEntry {
  std::string name;
  std::string content = "x";
  unsigned type = AE_IFREG;
  std::string link = "";
  bool hard = false;
  std::int64_t hole = 0;  // of zeros at its end
};

using Filter = int (*)(archive*);

void write_tar(const fs::path& path, const std::vector<ArchiveEntry>& entries, Filter filter = nullptr) {
  archive* tar = archive_write_new();
  archive_write_set_format_pax(tar);
  if (filter != nullptr) {
    ASSERT_EQ(filter(tar), ARCHIVE_OK);
  }
  ASSERT_EQ(archive_write_open_filename(tar, path.c_str()), ARCHIVE_OK);
  for (const ArchiveEntry& e : entries) {
    archive_entry* entry = archive_entry_new();
    archive_entry_set_pathname(entry, e.name.c_str());
    archive_entry_set_filetype(entry, e.type);
    archive_entry_set_perm(entry, 0755);
    const bool body = e.type == AE_IFREG && !e.hard;
    const auto size = static_cast<la_int64_t>(e.content.size());
    archive_entry_set_size(entry, body ? size + e.hole : 0);
    if (e.hole > 0) archive_entry_sparse_add_entry(entry, 0, size);
    if (e.type == AE_IFLNK) archive_entry_set_symlink(entry, e.link.c_str());
    if (e.hard) archive_entry_set_hardlink(entry, e.link.c_str());
    ASSERT_EQ(archive_write_header(tar, entry), ARCHIVE_OK);
    if (body) archive_write_data(tar, e.content.data(), e.content.size());
    archive_entry_free(entry);
  }
  archive_write_close(tar);
  archive_write_free(tar);
}

std::string png(std::int64_t height, std::int64_t width, std::int64_t channels, std::uint8_t start) {
  Image image;
  image.reshape(height, width, channels);
  for (auto& value : image.pixels) value = start += 37;
  const std::vector<std::byte> file = encode_png(image);
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

TEST(DatasetToolsTest, ATarBecomesAFolder) {
  const test::TempDir dir;
  const std::vector<std::pair<std::string, Filter>> compressions = {{"tar", nullptr},
                                                                    {"gz", archive_write_add_filter_gzip},
                                                                    {"bz2", archive_write_add_filter_bzip2},
                                                                    {"xz", archive_write_add_filter_xz},
                                                                    {"zst", archive_write_add_filter_zstd}};
  for (const auto& [ending, filter] : compressions) {
    SCOPED_TRACE(ending);
    const fs::path tar = dir / ("set." + ending);
    write_tar(tar, {{"set/", "", AE_IFDIR}, {"./set/cat/1.jpg", "one"}, {"set/dog/2.jpg", "three"}}, filter);
    const std::string out = (dir / ("out " + ending)).string();
    const GeneratedFolder made = unpack_tar(tar.string(), out, {.strip = 1});
    EXPECT_EQ(made.files, 2);
    EXPECT_EQ(made.bytes, 8);
    EXPECT_EQ(test::read_file(out + "/dog/2.jpg"), "three");
    EXPECT_EQ(scan_image_folder(out).classes(), (std::vector<std::string>{"cat", "dog"}));
    EXPECT_FALSE(fs::exists(out + ".partial"));
    COHORT_EXPECT_THROW_WITH(unpack_tar(tar.string(), out), DataError, "exists already");
  }
}

TEST(DatasetToolsTest, OtherCompressionsAreRejectedAndStartNoProgram) {
  const test::TempDir dir;
  // lrzip, lzop and grzip are programs that libarchive looks for in PATH.
  const std::string program = "#!/bin/sh\ntouch '" + (dir / "started").string() + "'\ncat\n";
  for (const char* name : {"lrzip", "lzop", "grzip", "lzma", "compress", "uncompress"}) {
    test::write_file(dir / "bin" / name, program);
    fs::permissions(dir / "bin" / name, fs::perms::owner_all);
  }
  const test::ScopedEnv path("PATH", (dir / "bin").string() + ":/usr/bin:/bin");
  using namespace std::string_literals;
  const std::vector<std::string> magics = {"GRZipII\x00\x02\x04:)"s, "LRZI\0\6"s, "\x89LZO\0\r\n\x1a\n"s,
                                           "\x1f\x9d\x90"s};
  for (const std::string& magic : magics) {
    test::write_file(dir / "x", magic + std::string(4096, 'x'));
    COHORT_EXPECT_THROW_WITH(unpack_tar((dir / "x").string(), (dir / "out").string()), DataError,
                             "Unrecognized archive format");
    EXPECT_FALSE(fs::exists(dir / "started")) << magic;
  }
}

TEST(DatasetToolsTest, NamesBeyondAsciiAreTakenAsTheyAre) {
  // As in the program: no locale was set, so the C locale is in force.
  const test::TempDir dir;
  for (const char* format : {"pax_names", "gnu_names"}) {
    const fs::path tar = test::source_dir() / "tests/fuzz/corpus/tar" / format;
    EXPECT_EQ(unpack_tar(tar.string(), (dir / format).string()).files, 1);
    EXPECT_EQ(test::read_file(dir / format / "k\xc3\xa4se/\xe8\x8c\xb6.jpg"), "content");
  }
}

TEST(DatasetToolsTest, ATarThatUnpacksToTooMuchIsRejected) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  write_tar(tar, {{"a/1.jpg", std::string(600, 'x')}, {"a/2.jpg", std::string(400, 'x')}});
  EXPECT_EQ(unpack_tar(tar, (dir / "fits").string(), {.max_bytes = 1000, .max_entries = 3}).bytes, 1000);
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out, {.max_bytes = 999}), DataError,
                           "x.tar unpacks to more than 999 bytes. Try: a higher limit (--max-gib)");
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out, {.max_entries = 2}), DataError, "has more than 2 entries");
  // What is stripped away is uncompressed too.
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out, {.strip = 2, .max_bytes = 999}), DataError, "more than 999");
  // A hole takes no space in the archive: 1 TiB in some hundred bytes.
  write_tar(tar, {{"a/1.jpg", "x", AE_IFREG, "", false, std::int64_t{1} << 40}});
  EXPECT_LT(fs::file_size(tar), 20000U);
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "unpacks to more than 274877906944 bytes");
  EXPECT_FALSE(fs::exists(out));
  EXPECT_FALSE(fs::exists(out + ".partial"));
}

TEST(DatasetToolsTest, FoldersThatOnlyNamesMentionCountAsEntries) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "a/";
  write_tar(tar, {{deep + "1.jpg"}});
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out, {.max_entries = 1000}), DataError, "more than 1000 entries");
  EXPECT_EQ(unpack_tar(tar, out, {.max_entries = 1001}).files, 1);
  // Each folder once, whoever mentions it.
  write_tar(tar, {{"a/", "", AE_IFDIR}, {"a/b/1.jpg"}, {"c/1.jpg"}, {"a/b/2.jpg"}, {"a/2.jpg"}});
  EXPECT_EQ(unpack_tar(tar, out + "2", {.max_entries = 7}).files, 4);
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out + "3", {.max_entries = 6}), DataError, "more than 6 entries");
}

// A plain tar of one file whose PAX header holds `records`.
std::string tar_with_pax_records(const std::string& records) {
  const auto block = [](const std::string& name, char type, const std::string& body) {
    std::string header(512, '\0');
    header.replace(0, name.size(), name);
    std::snprintf(header.data() + 100, 25, "0000644%c0000000%c0000000", '\0', '\0');
    std::snprintf(header.data() + 124, 25, "%011zo%c%011o", body.size(), '\0', 0U);
    header.replace(148, 8, 8, ' ');
    header[156] = type;
    header.replace(257, 8, std::string("ustar\00000", 8));
    unsigned sum = 0;
    for (const char c : header) sum += static_cast<unsigned char>(c);
    std::snprintf(header.data() + 148, 8, "%06o", sum);
    return header + body + std::string((512 - body.size() % 512) % 512, '\0');
  };
  return block("pax", 'x', records) + block("short.jpg", '0', "content") + std::string(1024, '\0');
}

TEST(DatasetToolsTest, ADamagedPaxHeaderIsRejected) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  const std::string name = "cat/" + std::string(110, 'x') + ".jpg";
  const std::string good = base::concat("128 path=", name, "\n");
  ASSERT_EQ(good.size(), 128U);
  test::write_file(tar, tar_with_pax_records(good));
  EXPECT_EQ(unpack_tar(tar, out).files, 1);
  EXPECT_TRUE(fs::exists(fs::path(out) / name));
  // The name is in the header that is damaged: the file would get another.
  const std::vector<std::string> damaged = {
      "9" + good.substr(1),                   // a length that is too great
      "1x8" + good.substr(3),                 // and one that is none
      good.substr(0, good.size() - 1) + "x",  // no end of the line
      "junk",                                 // nothing like it
      "\xe9" + good.substr(1),                // also where the name is not UTF-8
      base::concat("25 uname=k\xc3\xa4sekuchen----\n", "9", good.substr(1)),
  };
  for (const std::string& records : damaged) {
    SCOPED_TRACE(records);
    test::write_file(tar, tar_with_pax_records(records));
    COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out + "2"), DataError, "cannot read archive");
    EXPECT_FALSE(fs::exists(out + "2"));
  }
}

TEST(DatasetToolsTest, NamesAreTakenAsTheyAreInALocaleOfUtf8Too) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  const std::string before = std::setlocale(LC_CTYPE, nullptr);
  ASSERT_NE(std::setlocale(LC_CTYPE, "C.UTF-8"), nullptr);
  // A letter in two parts, which libarchive would put together.
  test::write_file(tar, tar_with_pax_records("19 path=gro\xcc\x88"
                                             "e.jpg\n"));
  EXPECT_EQ(unpack_tar(tar, out).files, 1);
  std::setlocale(LC_CTYPE, before.c_str());
  EXPECT_EQ(fs::directory_iterator(out)->path().filename().string(),
            "gro\xcc\x88"
            "e.jpg");
}

TEST(DatasetToolsTest, NamesThatAreNotUtf8AreTakenAsTheyAre) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  test::write_file(tar, tar_with_pax_records("22 path=caf\xe9/1234.jpg\n"));
  EXPECT_EQ(unpack_tar(tar, out).files, 1);
  EXPECT_EQ(test::read_file(fs::path(out) / "caf\xe9/1234.jpg"), "content");
}

TEST(DatasetToolsTest, NamesThatAreTooLongAreNamed) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string(), longest(256, 'n');
  for (const std::string& name : {"a/" + longest, longest + "/1.jpg"}) {
    write_tar(tar, {{name}});
    COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "is too long for this file system");
  }
  test::write_file(dir / "flat/1.jpg", "one");
  const std::string list = (dir / "list.csv").string();
  for (const std::string& line : {"1.jpg," + longest, longest + ".jpg,cat"}) {
    test::write_file(list, line + "\n");
    COHORT_EXPECT_THROW_WITH(folder_from_list((dir / "flat").string(), list, out), DataError, "list.csv:1: ");
  }
  EXPECT_FALSE(fs::exists(out + ".partial"));
}

TEST(DatasetToolsTest, AnEntryMayHaveAnyName) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  write_tar(tar, {{".cohort-data", "one"}, {".cohort-data.new", "two"}, {"files", "three"}});
  EXPECT_EQ(unpack_tar(tar, out).files, 3);
  EXPECT_EQ(test::read_file(out + "/.cohort-data"), "one");
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 3);
  write_tar(tar, {{".cohort-data/1.jpg", "one"}});
  EXPECT_EQ(unpack_tar(tar, out + "2").files, 1);
}

TEST(DatasetToolsTest, AHoleAtTheEndOfAFileStays) {
  const test::TempDir dir;
  write_tar(dir / "x.tar", {{"a/1.jpg", std::string(600, 'x'), AE_IFREG, "", false, 100000}});
  EXPECT_EQ(unpack_tar((dir / "x.tar").string(), (dir / "out").string()).bytes, 100600);
  EXPECT_EQ(fs::file_size(dir / "out/a/1.jpg"), 100600U);
}

TEST(DatasetToolsTest, AFileAndAFolderOfOneNameAreRejected) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  const std::vector<std::vector<ArchiveEntry>> cases = {{{"a/b", "x"}, {"a/b/1.jpg", "x"}},
                                                        {{"a/b/1.jpg", "x"}, {"a/b", "x"}},
                                                        {{"a/b", "x"}, {"a/b/", "", AE_IFDIR}}};
  for (const std::vector<ArchiveEntry>& entries : cases) {
    write_tar(tar, entries);
    COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError,
                             "clashes with another: a file and a folder have one name");
    EXPECT_FALSE(fs::exists(out + ".partial"));
  }
}

TEST(DatasetToolsTest, ATarThatReachesOutIsRejectedAndLeavesNothing) {
  const test::TempDir dir;
  const std::string tar = (dir / "evil.tar").string(), out = (dir / "out").string();
  const std::vector<std::pair<ArchiveEntry, std::string>> cases = {
      {{"../evil.jpg"}, "leads out of the folder"},
      {{"a/../../evil.jpg"}, "leads out of the folder"},
      {{"/tmp/evil.jpg"}, "has an absolute name"},
      {{"a/link", "", AE_IFLNK, "/etc"}, "is a link or a device"},
      {{"a/hard", "", AE_IFREG, "good/1.jpg", true}, "is a link or a device"},
      {{"a/pipe", "", AE_IFIFO}, "is a link or a device"},
  };
  for (const auto& [entry, message] : cases) {
    write_tar(tar, {{"good/1.jpg"}, entry});
    COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, message);
    EXPECT_FALSE(fs::exists(out));
    EXPECT_FALSE(fs::exists(out + ".partial"));
  }
  EXPECT_FALSE(fs::exists(dir / "evil.jpg"));
}

TEST(DatasetToolsTest, ABrokenTarIsNamed) {
  const test::TempDir dir;
  const std::string tar = (dir / "x.tar").string(), out = (dir / "out").string();
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "cannot read archive " + tar);
  test::write_file(tar, std::string(5000, 'j'));
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "cannot read archive");
  write_tar(tar, {{"a/1.jpg", std::string(100000, 'a')}});
  fs::resize_file(tar, 50000);
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "cannot read archive");
  write_tar(tar, {});
  COHORT_EXPECT_THROW_WITH(unpack_tar(tar, out), DataError, "holds no files");
}

TEST(DatasetToolsTest, AListOfLabelsMakesAFolder) {
  const test::TempDir dir;
  test::write_file(dir / "flat/1.jpg", "one");
  test::write_file(dir / "flat/sub/a,b.jpg", "two");
  test::write_file(dir / "list.csv", "file,label\r\n1.jpg,cat\r\n\n\"sub/a,b.jpg\",\"big \"\"dog\"\"\"\n");
  const auto make = [&](const std::string& out, bool link = false) {
    return folder_from_list((dir / "flat").string(), (dir / "list.csv").string(), (dir / out).string(),
                            {link});
  };
  EXPECT_EQ(make("out").files, 2);
  EXPECT_EQ(test::read_file(dir / "out/big \"dog\"/a,b.jpg"), "two");
  EXPECT_EQ(make("linked", true).bytes, 6);
  EXPECT_EQ(fs::hard_link_count(dir / "linked/cat/1.jpg"), 2U);
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"1.jpg\n", "list.csv:1: got '1.jpg' (1 columns), expected file,label"},
      {"1.jpg,cat\nnone.jpg,cat\n", "list.csv:2: cannot copy"},
      {"../x.jpg,cat\n", "is not inside the folder"},
      {"/etc/passwd,cat\n", "is not inside the folder"},
      {"1.jpg,..\n", "label '..' cannot be a folder's name"},
      {"1.jpg,cat\n1.jpg,cat\n", "has a second file named 1.jpg"},
      {"", "names no files"},
  };
  for (const auto& [list, message] : bad) {
    test::write_file(dir / "list.csv", list);
    COHORT_EXPECT_THROW_WITH(make("bad"), DataError, message);
    EXPECT_FALSE(fs::exists(dir / "bad"));
  }
  fs::remove(dir / "list.csv");
  COHORT_EXPECT_THROW_WITH(make("bad"), DataError, "cannot open ");
}

TEST(DatasetToolsTest, AListOfLinksAndOneWithBlankLines) {
  const test::TempDir dir;
  test::write_file(dir / "blobs/abc", "one");
  fs::create_directories(dir / "flat");
  fs::create_symlink("../blobs/abc", dir / "flat/1.jpg");
  fs::create_symlink("../blobs/none", dir / "flat/2.jpg");
  const std::string flat = (dir / "flat").string(), list = (dir / "list.csv").string();
  test::write_file(list, "\n \nlabel,file\ncat,1.jpg\n");
  for (const bool link : {false, true}) {
    SCOPED_TRACE(link);
    const fs::path out = dir / base::concat("out", link);
    EXPECT_EQ(folder_from_list(flat, list, out.string(), {link}).bytes, 3);
    EXPECT_FALSE(fs::is_symlink(out / "cat/1.jpg"));
    EXPECT_EQ(test::read_file(out / "cat/1.jpg"), "one");
    EXPECT_EQ(fs::hard_link_count(out / "cat/1.jpg"), link ? 2U : 1U);
  }
  test::write_file(list, "2.jpg,cat\n");
  COHORT_EXPECT_THROW_WITH(folder_from_list(flat, list, (dir / "bad").string(), {true}), DataError,
                           "list.csv:1: cannot copy");
}

TEST(DatasetToolsTest, AListMayHaveAByteOrderMarkAndMoreColumns) {
  const test::TempDir dir;
  for (const char* name : {"1", "2"}) test::write_file(dir / "flat" / name, name);
  const auto make = [&](const std::string& list) {
    test::write_file(dir / "list.csv", list);
    fs::remove_all(dir / "out");
    return folder_from_list((dir / "flat").string(), (dir / "list.csv").string(), (dir / "out").string())
        .files;
  };
  EXPECT_EQ(make("\xEF\xBB\xBF"
                 "file,label\n1,a\n2,b"),
            2);
  EXPECT_TRUE(fs::exists(dir / "out/b/2"));
  EXPECT_EQ(make("\xEF\xBB\xBF"
                 "1,a\n"),
            1);
  EXPECT_EQ(make("id, label, width, file\n7,a,5,1\n8,b,5,2\n"), 2);
  EXPECT_TRUE(fs::exists(dir / "out/b/2"));
  COHORT_EXPECT_THROW_WITH(make("id,label,file\n7,a\n"), DataError,
                           "list.csv:2: got '7,a' (2 columns), expected 3");
  COHORT_EXPECT_THROW_WITH(
      make("1,a,5\n"), DataError,
      "list.csv:1: got '1,a,5' (3 columns), expected file,label. Try: a first line that names");
  COHORT_EXPECT_THROW_WITH(make("filename,class\n1,a\n"), DataError,
                           "No such file or directory. Try: a heading names its columns file and label");
}

TEST(DatasetToolsTest, IdxFilesBecomeAFolderOfJpegs) {
  const test::TempDir dir;
  std::string images{'\0', '\0', 8, 3, 0, 0, 0, 30, 0, 0, 0, 28, 0, 0, 0, 28},
      labels{'\0', '\0', 8, 1, 0, 0, 0, 30};
  for (int i = 0; i < 30; ++i) {
    images += std::string(28 * 28, static_cast<char>(i * 8));
    labels += static_cast<char>(i % 3);
  }
  test::write_file(dir / "i", images);
  test::write_file(dir / "l", labels);
  const auto make = [&](const IdxFolderOptions& options) {
    return folder_from_idx((dir / "i").string(), (dir / "l").string(), (dir / "out").string(), options);
  };
  COHORT_EXPECT_THROW_WITH(make({.class_names = {"a", "b"}}), UsageError,
                           "label 2 has no name: got 2 class names");
  COHORT_EXPECT_THROW_WITH(make({.class_names = {"a", "b/c", "d"}}), UsageError, "class name 'b/c'");
  EXPECT_FALSE(fs::exists(dir / "out.partial"));
  const GeneratedFolder made = make({.class_names = {"a", "b", "c"}, .threads = 3});
  EXPECT_EQ(made.files, 30);
  const FolderIndex index = scan_image_folder((dir / "out").string());
  EXPECT_EQ(index.size(), 30);
  EXPECT_STREQ(index.name(10), "b/01.jpg");
  std::vector<std::byte> buffer;
  Image image;
  decode_image(read_file_bytes(index.path(10), buffer), ColorMode::kGray, "x", image);
  EXPECT_EQ(image.pixels[5], 8);
  test::write_file(dir / "l", labels.replace(7, 1, "\x1d").substr(0, 8 + 29));
  COHORT_EXPECT_THROW_WITH(make({}), DataError, "has 30 images");
}

TEST(DatasetToolsTest, VerifyListsEveryBrokenFile) {
  const test::TempDir dir;
  for (int i = 0; i < 40; ++i) test::write_file(dir / ("a/" + std::to_string(i) + ".png"), png(5, 4, 3, 1));
  test::write_file(dir / "a/text.jpg", "this is no image");
  test::write_file(dir / "b/short.png", png(5, 4, 3, 1).substr(0, 50));
  test::write_file(dir / "b/void.jpg", "");
  test::write_file(dir / "b/not checked.webp", "");
  for (const int threads : {1, 4}) {
    const VerifyReport report = verify_folder(dir.path().string(), threads);
    EXPECT_EQ(report.checked, 43);
    EXPECT_TRUE(test::message_contains(report.passed_over, "1 .webp (such as b/not checked.webp)"));
    ASSERT_EQ(report.broken.size(), 3U);
    EXPECT_EQ(report.broken[0].path, dir.path().string() + "/a/text.jpg");
    EXPECT_EQ(report.broken[2].path, dir.path().string() + "/b/void.jpg");
    EXPECT_NE(report.broken[1].reason.find("short.png"), std::string::npos);
  }
}

TEST(DatasetToolsTest, StatisticsAreThoseOfThePixels) {
  const test::TempDir dir;
  std::vector<double> sum(3), squares(3);
  double count = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string file = png(3 + i, 7, 3, static_cast<std::uint8_t>(i * 11));
    test::write_file(dir / ("a/" + std::to_string(i) + ".png"), file);
    Image image;
    decode_image(std::as_bytes(std::span(file)), ColorMode::kRgb, "x", image);
    for (std::size_t p = 0; p < image.pixels.size(); ++p) {
      const double value = image.pixels[p] / 255.0;
      sum[p % 3] += value;
      squares[p % 3] += value * value;
    }
    count += static_cast<double>(image.height * image.width);
  }
  const ChannelStatistics got = channel_statistics(dir.path().string(), ColorMode::kRgb, 3);
  EXPECT_EQ(got.images, 20);
  EXPECT_EQ(got.pixels, static_cast<std::int64_t>(count));
  for (std::size_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(got.mean[c], sum[c] / count, 1e-12);
    EXPECT_NEAR(got.deviation[c], std::sqrt(squares[c] / count - std::pow(sum[c] / count, 2)), 1e-9);
  }
  EXPECT_EQ(channel_statistics(dir.path().string(), ColorMode::kGray).mean.size(), 1U);
}

}  // namespace
}  // namespace cohort::data
