#include "cohort/data/transforms/transform_registry.h"

#include <map>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/data/transforms/internal/builtin.h"

namespace cohort::data {
namespace {

struct RegisteredTransform {
  std::string first_argument;
  TransformFactory make;
};

std::map<std::string, RegisteredTransform> built_in() {
  std::map<std::string, RegisteredTransform> entries;
  for (const BuiltinTransform& builtin : builtin_transforms()) {
    entries[builtin.name] = {builtin.first_argument, builtin.make};
  }
  return entries;
}

base::Registry<RegisteredTransform>& registry() {
  // Reserved are the pipeline's own, which make the tensor.
  static auto* instance = new base::Registry<RegisteredTransform>("transform", "data.transforms", built_in(),
                                                                  {"Normalize", "ToTensor"});
  return *instance;
}

}  // namespace

void register_transform(const std::string& name, const std::string& first_argument,
                        TransformFactory factory) {
  if (!factory) throw UsageError("data.transforms", "a transform needs a factory");
  registry().add(name, {first_argument, std::move(factory)}, "register_transform");
}

std::vector<std::string> transform_names() {
  return registry().names(base::RegistryNames::kAll);
}

std::unique_ptr<Transform> make_transform(const TransformSpec& spec) {
  // The pipeline's own are an error here, as unknown names are.
  const std::optional<RegisteredTransform> entry = registry().find(spec.name);
  if (!entry) {
    const std::vector<std::string> names = transform_names();
    throw ConfigError(
        "data.transforms", base::concat("unknown transform ", spec.name),
        base::concat(base::least_changed_name(spec.name, names), " (known: ", base::join(names), ")"));
  }
  TransformArgs args(spec, entry->first_argument);
  std::unique_ptr<Transform> transform = entry->make(args);
  // After the constructor has read what it knows.
  args.reject_the_rest();
  return transform;
}

}  // namespace cohort::data
