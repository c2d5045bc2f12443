#include "cohort/checkpoint/tensor_format.h"

#include <utility>

#include "cohort/base/error.h"

namespace cohort::checkpoint {
namespace {

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
  return registry().get(name);
}

TensorFormat tensor_format_of(const std::string& extension) {
  for (const std::string& name : registry().names()) {
    if (auto format = registry().find(name); format && format->extension == extension) return *format;
  }
  throw DataError("checkpoint.format", base::concat("no tensor format has the extension ", extension),
                  "--load LIB.so, the library that registers it");
}

std::vector<std::string> tensor_format_names() {
  return registry().names();
}

void register_tensor_format(const std::string& name, TensorFormat format) {
  if (!format.write || !format.read || format.extension.empty()) {
    throw UsageError("checkpoint.format", "a tensor format needs an extension, write and read");
  }
  for (const std::string& other : registry().names()) {
    if (registry().find(other)->extension == format.extension) {
      throw UsageError("checkpoint.format", base::concat("the tensor format '", other, "' has the extension ",
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
