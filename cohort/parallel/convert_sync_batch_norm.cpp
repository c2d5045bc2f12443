// A walk over the module notes a step for each norm; the steps run only when the walk has rejected nothing.
// So a module is converted as a whole or not at all. A norm that is registered under several names gets a
// single replacement, which all of its places share.
#include "cohort/parallel/convert_sync_batch_norm.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/core/any_layer.h"
#include "cohort/parallel/sync_batch_norm.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;

constexpr const char* kWhereConvert = "parallel.convert_sync_batch_norm";

// Finds what is to be replaced first, so that a rejection leaves all as it was.
class Conversion {
 public:
  explicit Conversion(const comm::Group& group) : group_(group) {}

  void visit(nn::Module& parent, const std::string& prefix) {
    std::size_t index = 0;
    for (const auto& entry : parent.named_children()) {
      const NormLocation place{parent, entry.key(), prefix + entry.key(), index++};
      const std::shared_ptr<nn::Module>& child = entry.value();
      const bool norm = visit_norm<nn::BatchNorm1dImpl, SyncBatchNorm1d>(place, child, "BatchNorm1d") ||
                        visit_norm<nn::BatchNorm2dImpl, SyncBatchNorm2d>(place, child, "BatchNorm2d") ||
                        visit_norm<nn::BatchNorm3dImpl, SyncBatchNorm3d>(place, child, "BatchNorm3d");
      if (!norm) visit(*child, place.path + ".");
    }
  }

  std::int64_t replace() {
    for (const auto& step : steps_) step();
    return static_cast<std::int64_t>(converted_.size());
  }

 private:
  struct NormLocation {
    nn::Module& parent;
    std::string name, path;
    std::size_t index;  // among its parent's children
  };

  template <typename Norm, typename Sync>
  bool visit_norm(const NormLocation& place, const std::shared_ptr<nn::Module>& child, const char* type) {
    const auto norm = std::dynamic_pointer_cast<Norm>(child);
    if (norm == nullptr) return false;
    // A Sequential calls a list of its own and not its registered children, so both get the new norm.
    if (auto* const sequential = place.parent.as<nn::SequentialImpl>()) {
      steps_.push_back([this, sequential, norm, name = place.name, index = place.index] {
        const Sync sync = converted<Sync>(norm);
        *(sequential->begin() + static_cast<std::ptrdiff_t>(index)) = nn::AnyModule(sync.ptr());
        sequential->replace_module(name, sync.ptr());
      });
      return true;
    }
    // A LayerHost calls the layer through an AnyLayer, whose type may change.
    auto* const host = dynamic_cast<core::LayerHost*>(&place.parent);
    if (core::AnyLayer* const layer = host == nullptr ? nullptr : host->find_layer(place.name)) {
      steps_.push_back([this, layer, norm, parent = &place.parent, name = place.name] {
        const Sync sync = converted<Sync>(norm);
        *layer = sync;
        parent->replace_module(name, sync.ptr());
      });
      return true;
    }
    const std::string sync = base::concat("parallel::Sync", type);
    throw UsageError(kWhereConvert,
                     base::concat(place.path, " is a torch::nn::", type, " that ", place.parent.name(),
                                  " calls by its type, so it cannot be replaced"),
                     base::concat("in that module ", sync, " ", place.name, "{nullptr}; and ", place.name,
                                  " = register_module(\"", place.name, "\", ", sync, "(",
                                  norm->options.num_features(), ", group));"));
  }

  // One for each norm, however many names it has.
  template <typename Sync, typename Norm>
  Sync converted(const std::shared_ptr<Norm>& norm) {
    std::shared_ptr<nn::Module>& known = converted_[norm];
    if (!known) {
      Sync sync(norm->options, group_);
      sync->share(*norm);
      known = sync.ptr();
    }
    return Sync(std::static_pointer_cast<typename Sync::ContainedType>(known));
  }

  const comm::Group& group_;
  std::vector<std::function<void()>> steps_;
  std::map<std::shared_ptr<nn::Module>, std::shared_ptr<nn::Module>> converted_;
};

}  // namespace

std::int64_t convert_sync_batch_norm(nn::Module& module, const comm::Group& group) {
  if (!group) throw UsageError(kWhereConvert, "this process is not in the group");
  // A norm without a parent stands in no place where it could be replaced.
  if (module.as<nn::BatchNorm1dImpl>() != nullptr || module.as<nn::BatchNorm2dImpl>() != nullptr ||
      module.as<nn::BatchNorm3dImpl>() != nullptr) {
    throw UsageError(kWhereConvert,
                     base::concat("got a ", module.name(), ", expected a module that holds norms"),
                     "parallel::SyncBatchNorm2d(channels, group)");
  }
  Conversion conversion(group);
  conversion.visit(module, "");
  return conversion.replace();
}

}  // namespace cohort::parallel
