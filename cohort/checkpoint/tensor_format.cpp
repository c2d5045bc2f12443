// Formats are found by name where a checkpoint is written, and by the extension of its files where it is
// read. Two formats with one extension are an error at their first use: nothing can catch while a library
// loads.
#include "cohort/checkpoint/tensor_format.h"

#include <optional>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::checkpoint {
namespace {

constexpr const char* kWhere = "checkpoint.format";
constexpr const char* kNeeds = "an extension, write and read";

TensorFormat safetensors() {
  return {.extension = "safetensors",
          .write =
              [](const std::filesystem::path& path, const TensorMap& tensors) {
                // What loaders of PyTorch's models (transformers, timm) expect to see.
                return write_new_safetensors(path, tensors, Metadata{{"format", "pt"}});
              },
          .read =
              [](const std::shared_ptr<const MappedFile>& file) {
                return SafetensorsFile::from_mapping(file).tensors();
              }};
}

base::Registry<TensorFormat>& registry() {
  static auto* instance = new base::Registry<TensorFormat>("tensor format", "checkpoint.format",
                                                           {{"safetensors", safetensors()}});
  return *instance;
}

}  // namespace

TensorFormat tensor_format(const std::string& name) {
  TensorFormat format = registry().get(name);
  if (!format.write || !format.read || format.extension.empty()) {
    throw UsageError(kWhere, base::concat("the tensor format '", name, "' was registered without ", kNeeds));
  }
  tensor_format_of(format.extension);  // throws where another has it too
  return format;
}

TensorFormat tensor_format_of(const std::string& extension) {
  std::optional<TensorFormat> found;
  std::string owner;
  for (const std::string& name : registry().names()) {
    std::optional<TensorFormat> format = registry().find(name);
    if (!format || format->extension != extension) continue;
    registry().check(name);
    if (found) {
      throw UsageError(kWhere,
                       base::concat("the tensor formats '", owner, "' and '", name,
                                    "' have the same extension, ", extension),
                       "another extension for one of them");
    }
    found = std::move(format);
    owner = name;
  }
  if (found) return *std::move(found);
  throw DataError(kWhere, base::concat("no tensor format has the extension ", extension),
                  "--load LIB.so, the library that registers it");
}

std::vector<std::string> tensor_format_names() {
  return registry().names();
}

void register_tensor_format(const std::string& name, TensorFormat format) {
  if (!format.write || !format.read || format.extension.empty()) {
    throw UsageError(kWhere, base::concat("a tensor format needs ", kNeeds));
  }
  // Before it is added, so that a rejected format leaves the registry as it was.
  for (const std::string& other : registry().names()) {
    if (registry().find(other)->extension == format.extension) {
      throw UsageError(kWhere, base::concat("the tensor format '", other, "' has the extension ",
                                            format.extension, " already"));
    }
  }
  registry().add(name, std::move(format), "register_tensor_format");
}

bool register_tensor_format_at_load(const char* name, TensorFormat format, const char* file,
                                    int line) noexcept {
  return registry().add_at_load(name, std::move(format), file, line);
}

}  // namespace cohort::checkpoint
