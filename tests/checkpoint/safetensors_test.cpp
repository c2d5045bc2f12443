#include "cohort/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "tests/support/file_with_hole.h"
#include "tests/support/processes/python.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

using test::read_file;
using test::TempDir;
using test::write_file;

const std::filesystem::path kHere = test::source_dir() / "tests/checkpoint";

std::string message_of(const std::filesystem::path& path) {
  try {
    load_safetensors(path);
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

TEST(SafetensorsTest, EveryDtypeThatPythonWroteIsRead) {
  const auto file = SafetensorsFile::open(kHere / "golden" / "all_dtypes.safetensors");
  EXPECT_EQ(file.metadata().at("a"), "\u00e9 \"x\" / \\");
  ASSERT_EQ(file.header().entries.size(), 23u);
  const std::pair<const char*, at::ScalarType> expected[] = {
      {"uint8", at::kByte},
      {"int8", at::kChar},
      {"int16", at::kShort},
      {"uint16", at::kUInt16},
      {"int32", at::kInt},
      {"uint32", at::kUInt32},
      {"int64", at::kLong},
      {"uint64", at::kUInt64},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"complex64", at::kComplexFloat},
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2},
      {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
      {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
      {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
      {"float4_e2m1fn_x2", at::ScalarType::Float4_e2m1fn_x2}};
  std::string raw;
  for (char i = 0; i < 16; ++i) raw += i;
  for (const auto& [name, dtype] : expected) {
    const at::Tensor tensor = file.tensor(name);
    EXPECT_EQ(tensor.scalar_type(), dtype) << name;
    EXPECT_EQ(tensor.size(1) * tensor.element_size(), 8) << name;
    EXPECT_EQ(std::string(static_cast<const char*>(tensor.const_data_ptr()), 16), raw) << name;
  }
  EXPECT_TRUE(at::equal(file.tensor("bool").to(at::kLong), (at::arange(16) % 2).view({2, 8})));
  EXPECT_EQ(file.tensor("empty").sizes(), (at::IntArrayRef{3, 0, 2}));
  EXPECT_EQ(file.tensor("scalar").item<double>(), 2.5);
  EXPECT_TRUE(at::equal(file.tensor("a name.with \"quotes\" \\ and \u00e9\n"), at::arange(1, 4)));
}

TEST(SafetensorsTest, TheSameTensorsGiveTheSameBytesAsPython) {
  TempDir dir;
  const auto golden = kHere / "golden" / "all_dtypes.safetensors";
  const auto file = SafetensorsFile::open(golden);
  TensorMap tensors = file.tensors();
  std::reverse(tensors.begin(), tensors.end());
  const FileSummary summary = save_safetensors(dir / "again.safetensors", tensors, file.metadata());
  const std::string bytes = read_file(dir / "again.safetensors");
  EXPECT_EQ(bytes, read_file(golden));
  EXPECT_EQ(summary.bytes, bytes.size());
  EXPECT_EQ(summary.checksum, checksum(std::as_bytes(std::span(bytes.data(), bytes.size()))));
}

TensorMap example() {
  const at::Tensor plain = at::arange(24, at::kFloat).view({1, 2, 3, 4});
  const at::Tensor shared = at::ones({5});
  return {{"plain", plain},
          {"channels_last", plain.contiguous(at::MemoryFormat::ChannelsLast)},
          {"transposed", at::arange(6).view({2, 3}).t()},
          {"half", at::full({3}, 1.5, at::kHalf)},
          {"brain", at::full({3}, 1.5, at::kBFloat16)},
          {"flags", at::tensor({1, 0, 1}).to(at::kBool)},
          {"shared_a", shared},
          {"shared_b", shared},
          {"empty", at::empty({0, 5})},
          {"scalar", at::scalar_tensor(7, at::kLong)}};
}

TEST(SafetensorsTest, PythonReadsWhatWeWrite) {
  COHORT_NEED_PYTHON();
  TempDir dir;
  save_safetensors(dir / "ours.safetensors", example(), {{"by", "cohort \u00e9"}});
  EXPECT_EQ(test::run_python({kHere / "read_with_pytorch.py", "bytes", dir / "ours.safetensors"}), 0);
}

TEST(SafetensorsTest, WrittenTensorsAreReadBackInLogicalOrder) {
  TempDir dir;
  save_safetensors(dir / "t.safetensors", example());
  const auto file = SafetensorsFile::open(dir / "t.safetensors");
  for (const auto& [name, tensor] : example()) {
    EXPECT_TRUE(at::equal(file.tensor(name), tensor)) << name;
    EXPECT_EQ(file.tensor(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(file.tensor(name).is_contiguous()) << name;
  }
  const at::Tensor conjugate = at::view_as_complex(at::tensor({1.f, 2.f}).view({1, 2})).conj();
  save_safetensors(dir / "c.safetensors", {{"c", conjugate}});
  EXPECT_TRUE(at::equal(load_safetensors(dir / "c.safetensors")[0].second, conjugate.resolve_conj()));
}

TEST(SafetensorsTest, ChunksOfALargeFileAreAllChecksummed) {
  TempDir dir;
  TensorMap tensors{{"large", at::arange(9'000'001).to(at::kFloat)}};
  for (int i = 0; i < 200; ++i) tensors.emplace_back("small" + std::to_string(i), at::full({2000}, i));
  const FileSummary summary = save_safetensors(dir / "t.safetensors", tensors);
  const auto file = MappedFile::open(dir / "t.safetensors");
  EXPECT_EQ(summary.bytes, file->size());
  EXPECT_EQ(summary.checksum, checksum(file->bytes()));
  EXPECT_TRUE(at::equal(load_safetensors(dir / "t.safetensors")[0].second, tensors[0].second) ||
              at::equal(SafetensorsFile::open(dir / "t.safetensors").tensor("large"), tensors[0].second));
}

TEST(SafetensorsTest, TensorsKeepTheMappingAliveAndNeverChangeTheFile) {
  TempDir dir;
  const auto path = dir / "t.safetensors";
  save_safetensors(path, {{"a", at::arange(1000)}});
  const std::string before = read_file(path);
  at::Tensor tensor = load_safetensors(path)[0].second;
  tensor.add_(1);
  EXPECT_EQ(read_file(path), before);
  std::filesystem::remove(path);
  EXPECT_TRUE(at::equal(tensor, at::arange(1, 1001)));
}

TEST(SafetensorsTest, ReplacingAFileLeavesTensorsLoadedFromItAlone) {
  TempDir dir;
  const auto path = dir / "t.safetensors";
  save_safetensors(path, {{"a", at::arange(100000)}});
  const at::Tensor old = load_safetensors(path)[0].second;
  save_safetensors(path, {{"a", at::zeros({3})}});
  EXPECT_TRUE(at::equal(old, at::arange(100000)));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(SafetensorsTest, UnalignedDataIsCopiedToWholeElements) {
  TempDir dir;
  const std::string json = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  std::string file(8, '\0');
  file[0] = static_cast<char>(json.size());
  const float value = 3.5f;
  write_file(dir / "t.safetensors",
             file + json + "x" + std::string(reinterpret_cast<const char*>(&value), 4));
  const at::Tensor b = SafetensorsFile::open(dir / "t.safetensors").tensor("b");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.const_data_ptr()) % 4, 0u);
  EXPECT_EQ(b.item<float>(), 3.5f);
}

TEST(SafetensorsTest, ATensorAfter4GiBIsRead) {
  TempDir dir;
  constexpr std::uint64_t kLarge = (std::uint64_t{1} << 32) + 64;
  const std::string large = std::to_string(kLarge), end = std::to_string(kLarge + 4);
  std::string json = R"({"a":{"dtype":"U8","shape":[)" + large + R"(],"data_offsets":[0,)" + large +
                     R"(]},"b":{"dtype":"F32","shape":[1],"data_offsets":[)" + large + "," + end + "]}}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  length[0] = static_cast<char>(json.size());
  const float value = 3.5f;
  test::write_file_with_hole(dir / "t.safetensors", length + json, kLarge,
                             {reinterpret_cast<const char*>(&value), 4});
  const auto file = SafetensorsFile::open(dir / "t.safetensors");
  EXPECT_EQ(file.tensor("a").numel(), static_cast<std::int64_t>(kLarge));
  EXPECT_EQ(file.tensor("a")[-1].item<int>(), 0);
  EXPECT_EQ(file.tensor("b").item<float>(), 3.5f);
}

TEST(SafetensorsTest, ALargeFileIsSaved) {
  TempDir dir;
  at::Tensor large = at::zeros({static_cast<std::int64_t>(test::large_size()) / 4 + 9}, at::kFloat);
  large[-1] = 2;
  const FileSummary summary =
      save_safetensors(dir / "t.safetensors", {{"a", large}, {"b", at::full({3}, 7, at::kByte)}});
  const auto mapping = MappedFile::open(dir / "t.safetensors");
  EXPECT_EQ(summary.bytes, mapping->size());
  EXPECT_EQ(summary.checksum, checksum(mapping->bytes()));
  const auto file = SafetensorsFile::open(dir / "t.safetensors");
  EXPECT_TRUE(at::equal(file.tensor("a"), large));
  EXPECT_TRUE(at::equal(file.tensor("b"), at::full({3}, 7, at::kByte)));
}

TEST(SafetensorsTest, BadFilesAreNamed) {
  TempDir dir;
  EXPECT_NE(message_of(dir / "none").find("No such file"), std::string::npos);
  EXPECT_NE(message_of(dir.path()).find("is not a regular file"), std::string::npos);
  write_file(dir / "empty.safetensors", "");
  EXPECT_NE(message_of(dir / "empty.safetensors").find("empty.safetensors: the file is empty"),
            std::string::npos);
  save_safetensors(dir / "t.safetensors", {{"flag", at::ones({3}, at::kBool)}});
  std::string bytes = read_file(dir / "t.safetensors");
  bytes.back() = 2;
  write_file(dir / "flag.safetensors", bytes);
  EXPECT_NE(message_of(dir / "flag.safetensors").find("BOOL has a byte other than 0 and 1"),
            std::string::npos);
  COHORT_EXPECT_THROW_WITH(SafetensorsFile::open(dir / "t.safetensors").tensor("x"), DataError,
                           "has no tensor 'x'");
}

TEST(SafetensorsTest, TensorsThatCannotBeStoredAreRejectedAndNothingIsWritten) {
  TempDir dir;
  const auto save = [&](const at::Tensor& tensor) {
    save_safetensors(dir / "t.safetensors", {{"name", tensor}});
  };
  COHORT_EXPECT_THROW_WITH(save(at::Tensor()), UsageError, "tensor 'name' cannot be stored: it is undefined");
  COHORT_EXPECT_THROW_WITH(save(at::ones({2}).to_sparse()), UsageError, "sparse");
  COHORT_EXPECT_THROW_WITH(save(at::empty({2}, at::kMeta)), UsageError, "meta device");
  COHORT_EXPECT_THROW_WITH(save(at::ones({2}, at::kComplexDouble)), UsageError, "no dtype for ComplexDouble");
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  COHORT_EXPECT_THROW_WITH(save_safetensors(dir / "no" / "t", {}), SystemError, "No such file or directory");
}

}  // namespace
}  // namespace cohort::checkpoint
