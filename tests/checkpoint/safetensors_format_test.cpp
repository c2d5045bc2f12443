#include "cohort/checkpoint/safetensors_format.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

/// A file with that header and so many bytes of data.
std::string file_of(const std::string& json, size_t data_bytes) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return file + json + std::string(data_bytes, 'x');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_header(std::as_bytes(std::span(file.data(), file.size())), "some.safetensors");
}

std::string f32(const std::string& name, const std::string& shape, const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

TEST(SafetensorsFormatTest, HeaderIsReadInTheOrderOfTheData) {
  const auto header = parse(file_of(
      "{" + f32("b", "[2]", "[4,12]") + "," + f32("a", "[]", "[0,4]") + ",\"__metadata__\":{\"k\":\"v\"} } ",
      12));
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[1].shape, std::vector<int64_t>{2});
  EXPECT_EQ(header.metadata.at("k"), "v");
  EXPECT_EQ(header.find("b")->begin, 4u);
  EXPECT_EQ(header.find("c"), nullptr);
}

TEST(SafetensorsFormatTest, EmptyFileOfTensorsIsValid) {
  EXPECT_TRUE(parse(file_of("{}", 0)).entries.empty());
}

struct Broken {
  std::string file;
  const char* message;
};

TEST(SafetensorsFormatTest, EveryLyingHeaderIsRejectedByName) {
  const std::string long_name(5000, 'n');
  const Broken cases[] = {
      {"", "some.safetensors: the file is empty (0 bytes)"},
      {"abc", "got 3 bytes, expected at least 8"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10), "header length: got 18446744073709551615"},
      {std::string("\x09\0\0\0\0\0\0\0{}", 10), "header length: got 9, but the file has only 2 bytes"},
      {std::string(8, '\0'), "does not start with '{'"},
      {file_of(" {}", 0), "does not start with '{'"},
      {file_of("{", 0), "not valid JSON"},
      {file_of("{} x", 0), "not valid JSON near byte 12"},
      {file_of("{\"a\xff\":1}", 0), "not valid JSON"},
      {file_of("{\"a\":1}", 0), "the number 1 where the format does not allow it"},
      {file_of("{\"a\":[]}", 0), "an array where"},
      {file_of("{\"a\":null}", 0), "null where"},
      {file_of("{\"a\":{\"dtype\":{}}}", 0), "an object where"},
      {file_of("{\"__metadata__\":{\"k\":1}}", 0), "the number 1 where"},
      {file_of("{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0), "'k' twice"},
      {file_of("{" + f32("a", "[1]", "[0,4]") + "," + f32("a", "[1]", "[4,8]") + "}", 8), "'a' twice"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0), "'dtype' twice"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0), "lacks dtype, shape or two data_offsets"},
      {file_of("{\"a\":{\"strides\":[1]}}", 0), "unknown field 'strides'"},
      {file_of("{\"a\":{\"dtype\":\"F6_E2M3\"}}", 0), "dtype 'F6_E2M3', which is unknown here"},
      {file_of("{" + f32("a", "[-1]", "[0,4]") + "}", 4), "the number -1"},
      {file_of("{" + f32("a", "[1.5]", "[0,4]") + "}", 4), "the number 1.5"},
      {file_of("{" + f32("a", "[1]", "[0,4,4]") + "}", 4), "more than two numbers"},
      {file_of("{" + f32("a", "[1]", "[0]") + "}", 4), "lacks dtype, shape or two data_offsets"},
      {file_of("{" + f32("a", "[1]", "[4,0]") + "}", 4), "outside the 4 bytes of data"},
      {file_of("{" + f32("a", "[2]", "[0,8]") + "}", 4), "outside the 4 bytes of data"},
      {file_of("{" + f32("a", "[2]", "[0,4]") + "}", 4),
       "(F32 [2], data_offsets [0, 4]): got 4 bytes, expected 8"},
      {file_of("{" + f32("a", "[4294967296,4294967296]", "[0,0]") + "}", 0), "overflows"},
      {file_of("{" + f32("a", "[9223372036854775807]", "[0,4]") + "}", 4), "overflows"},
      {file_of("{" + f32("a", "[0,9223372036854775807,4]", "[0,0]") + "}", 0), "overflows"},
      {file_of("{" + f32("a", "[9223372036854775808]", "[0,4]") + "}", 4), "too large"},
      {file_of("{" + f32("a", "[99999999999999999999]", "[0,4]") + "}", 4), "the number 1e+20"},
      {file_of("{" + f32("a", "[1]", "[0,4]") + "," + f32("b", "[1]", "[8,12]") + "}", 12),
       "leaves a hole after"},
      {file_of("{" + f32("a", "[2]", "[0,8]") + "," + f32("b", "[1]", "[4,8]") + "}", 8), "overlaps"},
      {file_of("{" + f32("a", "[1]", "[0,4]") + "}", 9), "got 9 bytes of data, expected 4"},
      {file_of("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1),
       "no whole number of bytes"},
      {file_of("{" + f32(long_name, "[1]", "[1,5]") + "}", 5), "nnn...'"},
      {file_of("{" + f32("\\u0007bell", "[1]", "[1,5]") + "}", 5), "'?bell'"},
      {file_of("{\"a\":" + std::string(100000, '['), 0), "an array where"},
  };
  for (const Broken& broken : cases) {
    COHORT_EXPECT_THROW_WITH(parse(broken.file), DataError, broken.message);
  }
}

TEST(SafetensorsFormatTest, WrittenHeaderIsReadBackAndDataStartsAtAMultipleOfEight) {
  for (size_t length = 1; length < 20; ++length) {
    TensorEntry small{std::string(length, 'a'), StoredDtype::kBool, {3}};
    TensorEntry large{"z", StoredDtype::kF64, {2, 2}};
    std::vector<TensorEntry> entries{small, large};
    const std::string bytes = make_header(entries, {{"k", "v"}});
    const auto header = parse(bytes + std::string(35, 'x'));
    EXPECT_EQ(header.data_start % 8, 0u);
    EXPECT_EQ(header.entries[0].name, "z");
    EXPECT_EQ(header.entries[1].begin, 32u);
  }
}

TEST(SafetensorsFormatTest, NamesThatCannotBeStoredAreRejected) {
  const auto make = [](std::vector<TensorEntry> entries) { make_header(entries, {}); };
  const TensorEntry a{"a", StoredDtype::kF32, {1}};
  COHORT_EXPECT_THROW_WITH(make({a, a}), UsageError, "'a' is used twice or reserved");
  COHORT_EXPECT_THROW_WITH(make({{"__metadata__", StoredDtype::kF32, {1}}}), UsageError, "reserved");
  COHORT_EXPECT_THROW_WITH(make({{"\xff", StoredDtype::kF32, {1}}}), UsageError, "not valid UTF-8");
  COHORT_EXPECT_THROW_WITH(make({{"a", StoredDtype::kF32, {int64_t{1} << 62}}}), UsageError,
                           "cannot be stored");
}

}  // namespace
}  // namespace cohort::checkpoint
