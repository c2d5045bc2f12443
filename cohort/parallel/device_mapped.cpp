// Each name is followed to the place from which the parent calls the layer; there a PlacedLayer is put by a
// later step. The steps run only when all names were found, so a rejection leaves the model as it was. The
// layer itself stays registered under its name, so parameters and state dicts keep their names. A container
// whose own parent calls it by its type is placed child by child.
#include "cohort/parallel/device_mapped.h"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/core/any_layer.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;

constexpr const char* kWhereDeviceMap = "parallel.apply_device_map";

// What is called in the place of a layer. The layer itself stays registered, under its name.
class PlacedLayerImpl : public nn::Module {
 public:
  using LayerFunction = std::function<at::Tensor(const at::Tensor&)>;
  PlacedLayerImpl(LayerFunction call, PartName name, std::shared_ptr<PlacementWorker> worker)
      : call_(std::move(call)), name_(name), worker_(std::move(worker)) {}
  at::Tensor forward(const at::Tensor& input) { return run(name_, worker_, {}, call_, input); }

 private:
  LayerFunction call_;
  PartName name_;
  std::shared_ptr<PlacementWorker> worker_;
};
TORCH_MODULE(PlacedLayer);

// Finds what is to be placed first, so that a rejection leaves all as it was.
class Placing {
 public:
  explicit Placing(nn::Module& model) : model_(model) {}

  void add(const std::string& path, const base::Placement& placement) {
    nn::Module* parent = &model_;
    std::size_t begin = 0;
    for (std::size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', begin)) {
      parent = &child_of(*parent, path.substr(begin, dot - begin), path);
      begin = dot + 1;
    }
    const std::string name = path.substr(begin);
    nn::Module& module = child_of(*parent, name, path);
    if (!add_child(*parent, name, path, placement)) add_all(*parent, module, path, placement);
  }
  std::int64_t apply_device_map() {
    for (const auto& step : steps_) step();
    return static_cast<std::int64_t>(steps_.size());
  }

 private:
  static nn::Module& child_of(nn::Module& parent, const std::string& name, const std::string& path) {
    std::vector<std::string> names;
    for (const auto& child : parent.named_children()) {
      if (child.key() == name) return *child.value();
      names.push_back(child.key());
    }
    throw UsageError(kWhereDeviceMap, base::concat("there is no module \"", path, "\""),
                     names.empty() ? "" : base::least_changed_name(name, names));
  }

  bool add_child(nn::Module& parent, const std::string& name, const std::string& path,
                 const base::Placement& placement) {
    const auto children = parent.named_children();
    const std::shared_ptr<nn::Module> child = children[name];
    const auto replace = [&](auto set, PlacedLayerImpl::LayerFunction call) {
      steps_.push_back([=, part = base::concat(path, " on ", placement.name)] {
        const auto worker = PlacementWorker::of(placement);
        child->to(worker->device());
        set(PlacedLayer(call, PartName(part), worker));
      });
      return true;
    };
    if (auto* const sequential = parent.as<nn::SequentialImpl>()) {
      std::ptrdiff_t index = 0;
      while (children[static_cast<std::size_t>(index)].key() != name) ++index;
      // A copy of what is called now: its place is overwritten by the PlacedLayer that calls it.
      nn::AnyModule layer = *(sequential->begin() + index);
      return replace(
          [=](const PlacedLayer& placed) { *(sequential->begin() + index) = nn::AnyModule(placed.ptr()); },
          [layer](const at::Tensor& x) mutable { return layer.forward(x); });
    }
    auto* const host = dynamic_cast<core::LayerHost*>(&parent);
    core::AnyLayer* const layer = host == nullptr ? nullptr : host->find_layer(name);
    if (layer == nullptr) return false;
    return replace([=](const PlacedLayer& placed) { *layer = placed; },
                   [own = *layer](const at::Tensor& x) { return own.forward(x); });
  }

  void add_all(nn::Module& parent, nn::Module& module, const std::string& path,
               const base::Placement& placement) {
    // If one child cannot be placed, the steps of the others go too.
    const std::size_t before = steps_.size();
    bool all = module.children().size() > 0;
    for (const auto& child : module.named_children()) {
      all = all && add_child(module, child.key(), path + "." + child.key(), placement);
    }
    if (all) return;
    steps_.resize(before);
    const std::string name = path.substr(path.rfind('.') + 1);
    throw UsageError(kWhereDeviceMap,
                     base::concat("\"", path, "\" is a ", module.name(), " that ", parent.name(),
                                  " calls by its type, so it cannot be placed by name"),
                     base::concat("in that module a member parallel::DeviceMapped<...> ", name, "; made by ",
                                  name, "(register_module(\"", name, "\", ...), base::Placement::parse(\"",
                                  placement.name, "\")); and called ", name, ".forward(x)"));
  }

  nn::Module& model_;
  std::vector<std::function<void()>> steps_;
};

}  // namespace

std::int64_t apply_device_map(nn::Module& model, const std::map<std::string, base::Placement>& placements) {
  Placing placing(model);
  for (const auto& [path, placement] : placements) placing.add(path, placement);
  return placing.apply_device_map();
}

}  // namespace cohort::parallel
