#include "cohort/models/registry.h"

#include <map>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/make_named.h"
#include "cohort/models/lenet.h"
#include "cohort/models/mlp.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"

namespace cohort::models {
namespace {

template <typename Holder>
torch::nn::AnyModule make(const ModelOptions& options) {
  return torch::nn::AnyModule(Holder(options).ptr());
}

std::map<std::string, ModelFactory> built_in() {
  std::map<std::string, ModelFactory> factories;
  // A model reads its depth from options.name, so one factory serves all names of a family.
  for (const char* depth : {"11", "13", "16", "19"}) {
    factories[base::concat("vgg", depth)] = make<VGG>;
    factories[base::concat("vgg", depth, "_bn")] = make<VGG>;
  }
  for (const char* depth : {"18", "34", "50"}) factories[base::concat("resnet", depth)] = make<ResNet>;
  factories["lenet5"] = make<LeNet5>;
  factories["mlp"] = make<MLP>;
  return factories;
}

// A user's factory: what it throws says which model it was, and no option is ignored. Ours check by
// themselves.
ModelFactory checked(const std::string& name, ModelFactory factory) {
  return [name, factory = std::move(factory)](const ModelOptions& given) {
    const std::string owner = base::concat("model '", name, "'");
    const auto make = [&](const base::NamedOptions& extra) {
      ModelOptions options = given;
      options.extra = extra;
      return factory(options);
    };
    return base::make_named<UsageError>("models.registry", "models.options", owner, given.extra, make);
  };
}

base::Registry<ModelFactory>& registry() {
  // Never destroyed: static objects of plug-ins may still use it while the program ends.
  static auto* instance = new base::Registry<ModelFactory>("model", "models.registry", built_in());
  return *instance;
}

}  // namespace

torch::nn::AnyModule make_model(const ModelOptions& options) {
  return registry().get(options.name)(options);
}

void register_model(const std::string& name, ModelFactory factory) {
  if (!factory) throw UsageError("models.registry", "a model needs a factory");
  registry().add(name, checked(name, std::move(factory)), "register_model");
}

std::vector<std::string> model_names() {
  return registry().names();
}

bool register_model_at_load(const char* name, ModelFactory factory, const char* file, int line) noexcept {
  return registry().add_at_load(name, checked(name, std::move(factory)), file, line);
}

}  // namespace cohort::models
