#include "cohort/data/dataset.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <cstring>

#include "cohort/core/error.h"

namespace cohort::data {
namespace {

std::string to_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, DatasetFactory> factories;
};

// Never destroyed: plug-ins may be unloaded in any order at exit.
Registry& registry() {
  static Registry* instance = new Registry;
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

bool register_dataset(const std::string& name, DatasetFactory factory) {
  const std::lock_guard lock(registry().mutex);
  if (!registry().factories.emplace(name, std::move(factory)).second) {
    throw UsageError("data.registry", "dataset '" + name + "' is registered already", "another name");
  }
  return true;
}

std::shared_ptr<const Dataset> make_dataset(const std::string& name, const DatasetArgs& args) {
  DatasetFactory factory;
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().factories.find(name);
    if (found != registry().factories.end()) factory = found->second;
  }
  if (!factory) {
    std::string known;
    for (const std::string& other : dataset_names()) known += (known.empty() ? "" : ", ") + other;
    throw UsageError("data.registry", "no dataset is named '" + name + "'",
                     known.empty()
                         ? "load the library that registers it (--load LIB.so)"
                         : "one of " + known + ", or load the library that registers it (--load LIB.so)");
  }
  return factory(args);
}

std::vector<std::string> dataset_names() {
  const std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry().factories) names.push_back(name);
  return names;
}

}  // namespace cohort::data
