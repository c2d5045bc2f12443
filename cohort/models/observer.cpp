#include "cohort/models/observer.h"

#include <utility>

namespace cohort::models {
namespace {

// One for each thread: replicas on other threads are not seen, and a forward needs no lock to look here.
thread_local LayerObserver* current_observer = nullptr;

}  // namespace

LayerObserver::LayerObserver(const torch::nn::Module& root, Callback callback)
    : callback_(std::move(callback)), previous_(current_observer) {
  names_.emplace(&root, "");
  // The first name wins: a module that is registered twice keeps the name that a state dictionary gives it.
  const auto walk = [this](const auto& self, const torch::nn::Module& module,
                           const std::string& prefix) -> void {
    for (const auto& child : module.named_children()) {
      const std::string name = prefix.empty() ? child.key() : prefix + "." + child.key();
      names_.emplace(child.value().get(), name);
      self(self, *child.value(), name);
    }
  };
  walk(walk, root, "");
  current_observer = this;
}

LayerObserver::~LayerObserver() {
  current_observer = previous_;
}

LayerObserver* LayerObserver::current() noexcept {
  return current_observer;
}

void LayerObserver::report(const torch::nn::Module& layer, const at::Tensor& input,
                           const at::Tensor& output) const {
  const auto found = names_.find(&layer);
  if (found != names_.end()) callback_(found->second, layer, input, output);
}

}  // namespace cohort::models
