// An ExampleDataset learns its fields from the first sample that can be read, and every later sample must
// match them. So a batch's memory, which is laid out by the fields, never gets a sample of another size. A
// registered factory is wrapped: its errors name the data set and the split, and options that it does not
// read are rejected. The names of Cohort's own kinds are reserved in the registry, so no library can take
// them.
#include "cohort/data/dataset.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/make_named.h"
#include "cohort/data/check_index.h"

namespace cohort::data {
namespace {

// Samples that are tried for one that can be read.
constexpr std::int64_t kMaxTried = 100;

std::string to_text(const std::vector<std::int64_t>& shape) {
  return "[" + base::join(shape) + "]";
}

// Its memory is read as it lies there.
void check_on_cpu(const at::Tensor& tensor, std::int64_t index, const std::string& field) {
  const char* hint = "return tensors of the CPU: the loader brings whole batches to LoaderOptions::device";
  const auto reject = [&](const auto& what) {
    return UsageError("data.dataset", base::concat("get(", index, ") returned field '", field, "' ", what),
                      hint);
  };
  if (!tensor.defined()) throw reject("without a value");
  if (!tensor.device().is_cpu()) throw reject(base::concat("on ", tensor.device(), ", expected the CPU"));
  if (tensor.layout() != at::kStrided)
    throw reject(base::concat("of layout ", tensor.layout(), ", expected a dense tensor"));
}

// Kinds that Cohort brings, and their types. They are made from typed options, so they have no factory.
constexpr std::array kOwn = {std::pair("idx", "IdxDataset"), std::pair("image_folder", "ImageFolder"),
                             std::pair("synthetic", "SyntheticDataset")};

std::vector<std::string> own_names() {
  std::vector<std::string> names;
  for (const auto& [name, type] : kOwn) names.emplace_back(name);
  return names;
}

// What is made by `factory` of text that people write: it says what it was, and no option is ignored.
DatasetFactory checked(const std::string& name, DatasetFactory factory) {
  return [name, factory = std::move(factory)](const DatasetArgs& given) {
    // What the factory reads for another split is not known here: the message says for which one this is.
    const std::string split = given.text("split", "");
    const std::string owner =
        base::concat("data set '", name, "'", split.empty() ? "" : " (split " + split + ")");
    return base::make_named<DataError>("data.registry", "data.options", owner, given, factory,
                                       {"split", "path"});
  };
}

base::Registry<DatasetFactory>& registry() {
  static auto* instance = new base::Registry<DatasetFactory>("data set", "data.registry", {}, own_names());
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

// Sample 0 may be the broken one, and that is the loader's to reject or to skip.
void ExampleDataset::learn_fields() const {
  const std::int64_t samples = size();
  if (samples == 0) throw UsageError("data.dataset", "the dataset has no samples");
  std::exception_ptr first_error;
  for (std::int64_t index = 0; index < std::min(samples, kMaxTried); ++index) {
    std::vector<at::Tensor> sample;
    try {
      base::RandomStream random(0, 0, 0, base::Purpose::kTransform);
      sample = get(index, random);
    } catch (...) {
      if (first_error == nullptr) first_error = std::current_exception();
      continue;
    }
    if (sample.empty()) {
      throw UsageError("data.dataset", base::concat("get(", index, ") returned no tensor"),
                       "return {input, target}");
    }
    std::vector<Field> fields;
    for (std::size_t i = 0; i < sample.size(); ++i) {
      std::string name = i == 0 ? "input" : i == 1 ? "target" : base::concat("field", i);
      check_on_cpu(sample[i], index, name);
      fields.push_back({std::move(name), sample[i].scalar_type(), sample[i].sizes().vec(), false});
    }
    fields_ = std::move(fields);
    fields_from_ = index;
    return;
  }
  std::rethrow_exception(first_error);
}

std::vector<Field> ExampleDataset::fields() const {
  std::call_once(learnt_, [this] { learn_fields(); });
  return fields_;
}

void ExampleDataset::read(std::int64_t index, base::RandomStream& random,
                          std::span<std::byte* const> out) const {
  check_index("data.dataset", index, size());
  std::call_once(learnt_, [this] { learn_fields(); });
  const std::vector<at::Tensor> sample = get(index, random);
  if (sample.size() != fields_.size() || sample.size() != out.size()) {
    throw UsageError("data.dataset",
                     base::concat("get(", index, ") returned ", sample.size(), " tensors, sample ",
                                  fields_from_, " has ", fields_.size()));
  }
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const Field& field = fields_[i];
    check_on_cpu(sample[i], index, field.name);
    if (sample[i].scalar_type() != field.dtype || sample[i].sizes() != field.shape) {
      throw UsageError("data.dataset",
                       base::concat("get(", index, ") returned ", c10::toString(sample[i].scalar_type()), " ",
                                    to_text(sample[i].sizes().vec()), " as field '", field.name, "', sample ",
                                    fields_from_, " ", c10::toString(field.dtype), " ", to_text(field.shape)),
                       "return tensors of one type and shape for every index");
    }
    const at::Tensor tensor = sample[i].resolve_conj().resolve_neg().contiguous();
    std::memcpy(out[i], tensor.const_data_ptr(), static_cast<std::size_t>(field.bytes()));
  }
}

void register_dataset(const std::string& name, DatasetFactory factory) {
  if (!factory) throw UsageError("data.registry", "a data set needs a factory");
  registry().add(name, checked(name, std::move(factory)), "register_dataset");
}

bool register_dataset_at_load(const char* name, DatasetFactory factory, const char* file, int line) noexcept {
  return registry().add_at_load(name, checked(name, std::move(factory)), file, line);
}

std::shared_ptr<const Dataset> make_dataset(const std::string& name, const DatasetArgs& args) {
  for (const auto& [own, type] : kOwn) {
    if (name != own) continue;
    registry().check(name);  // a library that registered the name too gets an error that names it
    throw UsageError("data.registry",
                     base::concat("data set '", name, "' is made from options, not from text"),
                     base::concat("data::", type, ", or data.type: ", name, " in a configuration"));
  }
  return registry().get(name, base::RegistryNames::kAll)(args);
}

void check_dataset_name(const std::string& name) {
  registry().check(name);
}

bool is_own_dataset(const std::string& name) {
  return std::ranges::any_of(kOwn, [&](const auto& own) { return name == own.first; });
}

std::vector<std::string> dataset_names() {
  return registry().names(base::RegistryNames::kAll);
}

}  // namespace cohort::data
