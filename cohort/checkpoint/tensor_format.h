#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/checkpoint/file_writer.h"
#include "cohort/checkpoint/mapped_file.h"
#include "cohort/checkpoint/safetensors.h"

/// Formats of the tensors in a checkpoint, by name: safetensors, and those that a program or a library given
/// to `--load` registers.
namespace cohort::checkpoint {

/// A file format for named tensors.
struct TensorFormat {
  std::string extension;  ///< of its files, without a dot; no other format has it
  /// Writes a new file at `path`, which does not exist, and returns when it is on disk. Throws: SystemError.
  std::function<FileSummary(const std::filesystem::path& path, const TensorMap& tensors)> write;
  /// Returns the tensors in `file`, which may alias it and then keep it alive. Throws: DataError.
  std::function<TensorMap(const std::shared_ptr<const MappedFile>& file)> read;
};

/// Returns the format of that name. Throws: UsageError for an unknown name, naming the nearest and all, or
/// for one that two libraries registered.
TensorFormat tensor_format(const std::string& name);
/// Returns the format whose files have `extension`. Throws: DataError, where no format has it; UsageError,
/// where two have it.
TensorFormat tensor_format_of(const std::string& extension);

/// Returns all names, sorted.
std::vector<std::string> tensor_format_names();

/// Makes `format` known as `name`. Throws: UsageError if the name is taken or empty, or if the extension is.
/// Threads: any.
void register_tensor_format(const std::string& name, TensorFormat format);

/// What COHORT_REGISTER_TENSOR_FORMAT calls while a library loads: a name that is taken stays with the first,
/// and tensor_format throws, naming both places.
bool register_tensor_format_at_load(const char* name, TensorFormat format, const char* file,
                                    int line) noexcept;

}  // namespace cohort::checkpoint

/// Registers a format where it is written, at namespace scope.
#define COHORT_REGISTER_TENSOR_FORMAT(name, ...) \
  COHORT_REGISTER_AT_LOAD(checkpoint::register_tensor_format_at_load, name, __VA_ARGS__)
