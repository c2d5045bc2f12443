#include "cohort/models/registry.h"

#include <map>
#include <mutex>
#include <utility>

#include "cohort/core/error.h"
#include "cohort/core/suggest.h"
#include "cohort/models/lenet.h"
#include "cohort/models/mlp.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"

namespace cohort::models {
namespace {

constexpr const char* kWhere = "models.registry";

struct Entry {
  ModelFactory factory;
  std::string place;     // where it was registered
  std::string conflict;  // where it was registered again
};

template <typename Holder>
torch::nn::AnyModule make(const ModelOptions& options) {
  return torch::nn::AnyModule(Holder(options).ptr());
}

std::map<std::string, Entry> built_in() {
  std::map<std::string, Entry> entries;
  const auto add = [&entries](const std::string& name, ModelFactory factory) {
    entries[name] = {std::move(factory), "Cohort", ""};
  };
  for (const char* depth : {"11", "13", "16", "19"}) {
    add(core::concat("vgg", depth), make<VGG>);
    add(core::concat("vgg", depth, "_bn"), make<VGG>);
  }
  for (const char* depth : {"18", "34", "50"}) add(core::concat("resnet", depth), make<ResNet>);
  add("lenet5", make<LeNet5>);
  add("mlp", make<MLP>);
  return entries;
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, Entry> entries = built_in();
};

/// Lives for ever: libraries register while they load, and are unloaded after main.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

torch::nn::AnyModule make_model(const ModelOptions& options) {
  Entry entry;
  {
    Registry& known = registry();
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.entries.find(options.name);
    if (found != known.entries.end()) entry = found->second;
  }
  if (!entry.factory) {
    const std::vector<std::string> names = model_names();
    const auto near = core::closest(options.name, names);
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
    throw UsageError(kWhere, core::concat("no model is called `", options.name, "`"),
                     core::concat(near ? core::concat("`", *near, "`; ") : "", "the models are ", all,
                                  "; a model of your own needs --load LIB.so"));
  }
  if (!entry.conflict.empty()) {
    throw UsageError(kWhere,
                     core::concat("the model `", options.name, "` was registered twice: by ", entry.place,
                                  " and by ", entry.conflict),
                     "another name for one of them");
  }
  return entry.factory(options);
}

void register_model(const std::string& name, ModelFactory factory) {
  if (name.empty() || !factory) {
    throw UsageError(kWhere, "a model needs a name and a factory");
  }
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto [place, added] = known.entries.try_emplace(name);
  if (!added) {
    throw UsageError(kWhere,
                     core::concat("the model `", name, "` is already registered, by ", place->second.place),
                     "another name");
  }
  place->second = {std::move(factory), "register_model", ""};
}

std::vector<std::string> model_names() {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::vector<std::string> names;
  for (const auto& [name, entry] : known.entries) names.push_back(name);
  return names;
}

bool register_model_at_load(const char* name, ModelFactory factory, const char* file, int line) noexcept {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const std::string place = core::concat(file, ":", line);
  const auto [found, added] = known.entries.try_emplace(name);
  if (added) {
    found->second = {std::move(factory), place, ""};
  } else {
    found->second.conflict = place;
  }
  return added;
}

}  // namespace cohort::models
