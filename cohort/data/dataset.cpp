#include "cohort/data/dataset.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <cstring>

#include "cohort/core/error.h"
#include "cohort/core/registry.h"
#include "cohort/data/check_index.h"

namespace cohort::data {
namespace {

std::string to_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// The names that `data.kind` has for Cohort's own are taken: they are made from typed options, not from text.
std::map<std::string, DatasetFactory> built_in() {
  std::map<std::string, DatasetFactory> factories;
  for (const auto& [name, type] :
       {std::pair("idx", "IdxDataset"), {"image_folder", "ImageFolder"}, {"synthetic", "SyntheticDataset"}}) {
    const std::string message = core::concat("data set '", name, "' is made from options, not from text");
    const std::string hint = core::concat("data::", type, ", or data.kind: ", name, " in a configuration");
    factories[name] = [=](const DatasetArgs&) -> std::shared_ptr<const Dataset> {
      throw UsageError("data.registry", message, hint);
    };
  }
  return factories;
}

core::Registry<DatasetFactory>& registry() {
  static auto* instance = new core::Registry<DatasetFactory>("data set", "data.registry", built_in());
  return *instance;
}

}  // namespace

std::int64_t Field::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

std::int64_t Field::bytes() const {
  return numel() * static_cast<std::int64_t>(c10::elementSize(dtype));
}

std::string Dataset::describe(std::int64_t index) const {
  return "sample " + std::to_string(index);
}

std::vector<Field> ExampleDataset::fields() const {
  const std::lock_guard lock(mutex_);
  if (!fields_.empty()) return fields_;
  core::RandomStream random(0, 0, 0, core::Purpose::kTransform);
  const std::vector<at::Tensor> sample = get(0, random);
  if (sample.empty()) throw UsageError("data.dataset", "get(0) returned no tensor", "return {input, target}");
  for (std::size_t i = 0; i < sample.size(); ++i) {
    std::string name = i == 0 ? "input" : i == 1 ? "target" : "field" + std::to_string(i);
    fields_.push_back({std::move(name), sample[i].scalar_type(), sample[i].sizes().vec(), false});
  }
  return fields_;
}

void ExampleDataset::read(std::int64_t index, core::RandomStream& random,
                          std::span<std::byte* const> out) const {
  check_index("data.dataset", index, size());
  const std::vector<at::Tensor> sample = get(index, random);
  if (sample.size() != out.size()) {
    throw UsageError("data.dataset", core::concat("get(", index, ") returned ", sample.size(),
                                                  " tensors, sample 0 has ", out.size()));
  }
  // Set by fields(), which whoever knows the size of `out` has called, and never changed afterwards.
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const at::Tensor tensor = sample[i].contiguous();
    const Field& field = fields_[i];
    if (tensor.scalar_type() != field.dtype || tensor.sizes() != field.shape) {
      throw UsageError("data.dataset",
                       core::concat("get(", index, ") returned ", c10::toString(tensor.scalar_type()), " ",
                                    to_text(tensor.sizes().vec()), " as field '", field.name, "', sample 0 ",
                                    c10::toString(field.dtype), " ", to_text(field.shape)),
                       "return tensors of one type and shape for every index");
    }
    std::memcpy(out[i], tensor.const_data_ptr(), static_cast<std::size_t>(field.bytes()));
  }
}

void register_dataset(const std::string& name, DatasetFactory factory) {
  if (!factory) throw UsageError("data.registry", "a data set needs a factory");
  registry().add(name, std::move(factory), "register_dataset");
}

bool register_dataset_at_load(const char* name, DatasetFactory factory, const char* file, int line) noexcept {
  return registry().add_at_load(name, std::move(factory), file, line);
}

std::shared_ptr<const Dataset> make_dataset(const std::string& name, const DatasetArgs& args) {
  return registry().get(name)(args);
}

void check_dataset_name(const std::string& name) {
  registry().check(name);
}

std::vector<std::string> dataset_names() {
  return registry().names();
}

}  // namespace cohort::data
