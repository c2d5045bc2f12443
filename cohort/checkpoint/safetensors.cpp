// A tensor is a view of the mapped file, and its deleter holds the mapping; it is copied only where its
// address is not aligned. For writing, the format's part lays out names, types and shapes first, so the
// file's size is known. Tensors are then brought to the CPU and written singly, so at most a single copy is
// in memory. A save goes through a temporary name and a rename, so the name never stands for half a file.
#include "cohort/checkpoint/safetensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <map>

#include "cohort/base/error.h"
#include "cohort/checkpoint/internal/temporary_name.h"

namespace cohort::checkpoint {
namespace {

using base::concat;

// In the order of StoredDtype.
constexpr std::array kScalarTypes{
    at::kBool,
    at::ScalarType::Float4_e2m1fn_x2,
    at::kByte,
    at::kChar,
    at::kFloat8_e5m2,
    at::kFloat8_e4m3fn,
    at::kFloat8_e8m0fnu,
    at::kFloat8_e4m3fnuz,
    at::kFloat8_e5m2fnuz,
    at::kShort,
    at::kUInt16,
    at::kHalf,
    at::kBFloat16,
    at::kInt,
    at::kUInt32,
    at::kFloat,
    at::kComplexFloat,
    at::kDouble,
    at::kLong,
    at::kUInt64,
};

at::ScalarType scalar_type(StoredDtype dtype) {
  return kScalarTypes.at(static_cast<size_t>(dtype));
}

StoredDtype stored_dtype(const std::string& name, const at::Tensor& tensor) {
  const auto reject = [&name](const std::string& why) {
    throw UsageError("checkpoint.save", concat("tensor ", printable(name), " cannot be stored: ", why));
  };
  if (!tensor.defined()) {
    reject("it is undefined");
  }
  // None of these is a plain array of elements, which is all that the format holds.
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() || tensor.is_nested()) {
    reject("it is sparse, quantized, nested or on the meta device");
  }
  const auto found = std::find(kScalarTypes.begin(), kScalarTypes.end(), tensor.scalar_type());
  if (found == kScalarTypes.end()) {
    reject(concat("the format has no dtype for ", c10::toString(tensor.scalar_type())));
  }
  return static_cast<StoredDtype>(found - kScalarTypes.begin());
}

/// The entries of `tensors`, laid out, and the first bytes of their file.
std::string lay_out(const TensorMap& tensors, const Metadata& metadata, std::vector<TensorEntry>& entries) {
  for (const auto& [name, tensor] : tensors) {
    TensorEntry entry;
    entry.name = name;
    entry.dtype = stored_dtype(name, tensor);
    entry.shape = tensor.sizes().vec();
    if (entry.dtype == StoredDtype::kF4) {  // LibTorch counts pairs, the format single numbers
      if (entry.shape.empty()) {
        throw UsageError("checkpoint.save",
                         concat("tensor ", printable(name), " cannot be stored: F4 without dimension"));
      }
      entry.shape.back() *= 2;
    }
    entries.push_back(std::move(entry));
  }
  return make_header(entries, metadata);
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  return from_mapping(MappedFile::open(path));
}

SafetensorsFile SafetensorsFile::from_mapping(std::shared_ptr<const MappedFile> file) {
  SafetensorsFile result;
  result.header_ = parse_header(file->bytes(), file->path().string());
  result.file_ = std::move(file);
  return result;
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const TensorEntry* entry = header_.find(name);
  if (entry == nullptr) {
    throw DataError("checkpoint.safetensors",
                    concat(file_->path().string(), " has no tensor ", printable(name)));
  }
  return make_tensor(*entry);
}

TensorMap SafetensorsFile::tensors() const {
  TensorMap result;
  for (const TensorEntry& entry : header_.entries) {
    result.emplace_back(entry.name, make_tensor(entry));
  }
  return result;
}

at::Tensor SafetensorsFile::make_tensor(const TensorEntry& entry) const {
  const auto fail = [&](const std::string& what) {
    throw DataError("checkpoint.safetensors",
                    concat(file_->path().string(), ": tensor ", printable(entry.name), " ", what));
  };
  std::vector<int64_t> shape = entry.shape;
  if (entry.dtype == StoredDtype::kF4) {
    if (shape.empty() || shape.back() % 2 != 0) {
      fail("of dtype F4 has an odd last dimension, which LibTorch cannot hold");
    }
    shape.back() /= 2;
  }
  const auto bytes = file_->bytes().subspan(header_.data_start + entry.begin, entry.end - entry.begin);
  // Any other byte in a bool is undefined behaviour, and the compiler relies on it.
  if (entry.dtype == StoredDtype::kBool &&
      std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b > std::byte{1}; })) {
    fail("of dtype BOOL has a byte other than 0 and 1");
  }
  const at::TensorOptions options(scalar_type(entry.dtype));
  at::Tensor tensor =
      at::from_blob(bytes.data(), shape, [keep = file_](void*) {}, options, at::Device(at::kCPU));
  // Other writers may leave the data of a tensor at any byte; kernels expect whole elements.
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  return address % static_cast<uintptr_t>(tensor.element_size()) == 0 ? tensor : tensor.clone();
}

TensorMap load_safetensors(const std::filesystem::path& path) {
  return SafetensorsFile::open(path).tensors();
}

FileSummary write_new_safetensors(const std::filesystem::path& path, const TensorMap& tensors,
                                  const Metadata& metadata) {
  std::vector<TensorEntry> entries;
  const std::string header = lay_out(tensors, metadata, entries);
  std::map<std::string_view, const at::Tensor*> by_name;
  // make_header() has put the entries into the file's order.
  for (const auto& [name, tensor] : tensors) {
    by_name[name] = &tensor;
  }
  FileWriter writer(path, header.size() + (entries.empty() ? 0 : entries.back().end));
  writer.write(header);
  for (const TensorEntry& entry : entries) {
    // Conjugate and negative bits live in the tensor, not in its bytes, so they are resolved before the bytes
    // are taken.
    const at::Tensor plain = by_name.at(entry.name)->detach().resolve_conj().resolve_neg().cpu().contiguous();
    writer.write({static_cast<const std::byte*>(plain.const_data_ptr()), entry.end - entry.begin});
  }
  return writer.finish();
}

FileSummary save_safetensors(const std::filesystem::path& path, const TensorMap& tensors,
                             const Metadata& metadata) {
  const auto temporary = path.parent_path() / temporary_name(path.filename().string());
  std::filesystem::remove(temporary);
  const FileSummary summary = write_new_safetensors(temporary, tensors, metadata);
  try {
    rename_and_sync(temporary, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
  return summary;
}

}  // namespace cohort::checkpoint
