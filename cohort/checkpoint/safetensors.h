#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/checkpoint/file_writer.h"
#include "cohort/checkpoint/mapped_file.h"
#include "cohort/checkpoint/safetensors_format.h"

/// Tensors in safetensors files, as Python's `safetensors.torch` reads and writes them.
///
///     save_safetensors("model.safetensors", module_state(*model), {{"made_by", "me"}});
///     for (const auto& [name, tensor] : load_safetensors("model.safetensors")) ...
namespace cohort::checkpoint {

/// Named tensors in order.
using TensorMap = std::vector<std::pair<std::string, at::Tensor>>;

/// A safetensors file, open for reading.
/// Ownership: tensors alias the mapped file and keep the mapping alive by themselves; nothing is copied
/// and a page is read when it is first touched. Writing to such a tensor changes memory, never the
/// file.
/// Threads: any number may read.
class SafetensorsFile {
 public:
  /// Throws: DataError naming the file and what does not fit; see parse_header().
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same over a file that is mapped already.
  static SafetensorsFile from_mapping(std::shared_ptr<const MappedFile> file);

  /// The checked header: names, types, shapes and offsets.
  const SafetensorsHeader& header() const { return header_; }
  /// Texts that the file holds besides its tensors.
  const Metadata& metadata() const { return header_.metadata; }

  /// The tensor of that name, on the CPU.
  /// Throws: DataError if there is none, or if a BOOL tensor holds a byte other than 0 and 1.
  at::Tensor tensor(std::string_view name) const;
  /// All tensors in the order of their data.
  TensorMap tensors() const;

 private:
  at::Tensor make_tensor(const TensorEntry& entry) const;

  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
};

/// All tensors of the file at `path`; see SafetensorsFile.
TensorMap load_safetensors(const std::filesystem::path& path);

/// Writes `tensors` to `path` and returns when they are on disk. The file appears under its name only
/// when it is complete; one that was there is replaced in one step, so that tensors loaded from it stay
/// valid.
/// Layout: each tensor in logical (contiguous) order, whatever its strides or memory format. Tensors
/// that share storage are each written in full under their own names: the format knows no sharing. The
/// same tensors and metadata in any order give the same bytes, those of Python's `save_file`.
/// Memory: a contiguous CPU tensor is written from where it is; others are copied one at a time.
/// Throws: UsageError for a tensor that cannot be stored (sparse, quantized, meta, undefined, dtype
/// unknown to the format), a duplicate name; SystemError naming path and bytes needed, after which
/// nothing has changed on disk.
FileSummary save_safetensors(const std::filesystem::path& path, const TensorMap& tensors,
                             const Metadata& metadata = {});

/// Writes a new file at `path`, which must not exist, without the rename: for a folder that is renamed
/// itself.
FileSummary write_new_safetensors(const std::filesystem::path& path, const TensorMap& tensors,
                                  const Metadata& metadata = {});

}  // namespace cohort::checkpoint
