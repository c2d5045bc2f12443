#include "cohort/data/idx.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

std::string header(int type, const std::vector<std::uint32_t>& shape) {
  std::string bytes{'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const std::uint32_t extent : shape) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(extent >> shift & 255);
  }
  return bytes;
}

std::string gzip(const std::string& plain) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, plain.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(plain.data()));
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

IdxArray parse(const std::string& file, const IdxOptions& options = {}) {
  return parse_idx(std::as_bytes(std::span(file)), "set.idx", options);
}

TEST(IdxTest, ReadsPlainAndCompressed) {
  const std::string file = header(8, {2, 1, 3}) + "abcdef";
  for (const std::string& form : {file, gzip(file), gzip(file.substr(0, 7)) + gzip(file.substr(7))}) {
    const IdxArray array = parse(form);
    EXPECT_EQ(array.type, IdxType::kUInt8);
    EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 1, 3}));
    EXPECT_EQ(std::memcmp(array.bytes.data(), "abcdef", 6), 0);
  }
}

TEST(IdxTest, BringsNumbersToThisMachinesByteOrder) {
  const IdxArray shorts = parse(header(0x0B, {2}) + std::string("\x01\x02\xff\xfe", 4));
  std::int16_t values[2];
  std::memcpy(values, shorts.bytes.data(), 4);
  EXPECT_EQ(values[0], 258);
  EXPECT_EQ(values[1], -2);
  const IdxArray doubles = parse(header(0x0E, {1}) + std::string("\x3f\xf8\0\0\0\0\0\0", 8));
  double value = 0;
  std::memcpy(&value, doubles.bytes.data(), 8);
  EXPECT_EQ(value, 1.5);
}

TEST(IdxTest, SaysWhatIsWrong) {
  const std::string good = header(8, {2, 3}) + "abcdef";
  COHORT_EXPECT_THROW_WITH(parse(""), DataError, "set.idx: 0 bytes are too short");
  COHORT_EXPECT_THROW_WITH(parse("\x89PNG\r\n"), DataError, "wrong magic: got 0x89504e47");
  COHORT_EXPECT_THROW_WITH(parse(header(7, {1}) + "a"), DataError, "wrong magic: got 0x00000701");
  COHORT_EXPECT_THROW_WITH(parse(header(8, {})), DataError, "wrong magic: got 0x00000800");
  COHORT_EXPECT_THROW_WITH(parse(good.substr(0, 9)), DataError, "ends inside its header of 2 dimensions");
  COHORT_EXPECT_THROW_WITH(parse(good.substr(0, 15)), DataError,
                           "short body: got at most 3 bytes, expected 6 for 2 x 3");
  COHORT_EXPECT_THROW_WITH(parse(gzip(good.substr(0, 15))), DataError, "short body: got 3 bytes, expected 6");
  COHORT_EXPECT_THROW_WITH(parse(good + "g"), DataError, "over-long: there are bytes after the 6 expected");
  COHORT_EXPECT_THROW_WITH(parse(gzip(good + "g")), DataError, "over-long");
  COHORT_EXPECT_THROW_WITH(parse(gzip(good).substr(0, 20)), DataError, "the gzip data ends too early");
  COHORT_EXPECT_THROW_WITH(parse(gzip(good) + "junk"), DataError, "the gzip data is broken");
  std::string flipped = gzip(good);
  flipped[flipped.size() - 6] = static_cast<char>(flipped[flipped.size() - 6] ^ 1);
  COHORT_EXPECT_THROW_WITH(parse(flipped), DataError, "the gzip data is broken: incorrect data check");
}

TEST(IdxTest, AbsurdDimensionsTakeNoMemory) {
  const std::uint32_t most = 0xffffffff;
  COHORT_EXPECT_THROW_WITH(parse(header(8, {most, most, most})), DataError,
                           "absurd dimensions 4294967295 x 4294967295");
  COHORT_EXPECT_THROW_WITH(parse(header(0x0E, {most})), DataError,
                           "absurd dimensions 4294967295, expected at most");
  COHORT_EXPECT_THROW_WITH(parse(gzip(header(8, {most}) + "a")), DataError, "short body: got at most");
  COHORT_EXPECT_THROW_WITH(parse(header(8, {100}), {.max_bytes = 99}), DataError,
                           "expected at most 99 bytes");
}

TEST(IdxTest, ImagesAndLabelsAreToldApart) {
  const test::TempDir dir;
  test::write_file(dir / "images", header(8, {1, 1, 2}) + "ab");
  test::write_file(dir / "labels", header(8, {1}) + "a");
  EXPECT_EQ(read_idx_images((dir / "images").string()).shape.size(), 3U);
  EXPECT_EQ(read_idx_labels((dir / "labels").string()).shape.size(), 1U);
  COHORT_EXPECT_THROW_WITH(read_idx_images((dir / "labels").string()), DataError,
                           "not images: got type 8 and shape 1");
  COHORT_EXPECT_THROW_WITH(read_idx_labels((dir / "images").string()), DataError,
                           "not labels: got type 8 and shape 1 x 1 x 2");
  COHORT_EXPECT_THROW_WITH(read_idx((dir / "none").string()), DataError, "No such file");
}

TEST(IdxTest, FindsThePairUnderItsUsualNames) {
  const test::TempDir dir;
  const std::string root = dir.path().string();
  COHORT_EXPECT_THROW_WITH(find_idx_pair(root, "train"), DataError, "has no train-images-idx3-ubyte");
  test::write_file(dir / "train-images-idx3-ubyte.gz", "");
  COHORT_EXPECT_THROW_WITH(find_idx_pair(root, "train"), DataError, "has no train-labels-idx1-ubyte");
  test::write_file(dir / "train-labels.idx1-ubyte", "");
  const IdxPair pair = find_idx_pair(root, "train");
  EXPECT_EQ(pair.images, root + "/train-images-idx3-ubyte.gz");
  EXPECT_EQ(pair.labels, root + "/train-labels.idx1-ubyte");
}

}  // namespace
}  // namespace cohort::data
