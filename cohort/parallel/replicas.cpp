// Copies are made once; refresh() makes them equal to the module again. On the module's own device a copy's
// parameters share its memory; elsewhere the values are copied. That copy leaves the version counter alone,
// as an earlier forward, whose backward is to come, may have saved the tensor. When the module's tensors are
// no longer the same objects, every copy is made anew.
#include "cohort/parallel/replicas.h"

#include <ATen/core/grad_mode.h>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/core/generator_states.h"

namespace cohort::parallel {
namespace {

using torch::nn::Module;

constexpr const char* kWhereReplicas = "parallel.replicate";

// A module that cannot be cloned, the innermost first: its path and type.
std::string offending_module(const Module& module, const std::string& path) {
  for (const auto& child : module.named_children()) {
    const std::string found =
        offending_module(*child.value(), path.empty() ? child.key() : path + "." + child.key());
    if (!found.empty()) return found;
  }
  try {
    module.clone();
    return "";
  } catch (const c10::Error&) {
    return base::concat(path.empty() ? "the module" : "\"" + path + "\"", " (", module.name(), ")");
  }
}

std::shared_ptr<Module> clone(const Module& module) {
  try {
    return module.clone();
  } catch (const c10::Error& error) {
    const std::string found = offending_module(module, "");
    throw UsageError(
        kWhereReplicas,
        base::concat("cannot copy ", found.empty() ? module.name() : found, ": ", base::message_of(error)),
        "these lines for it,\n"
        "  struct NetImpl : torch::nn::Cloneable<NetImpl> {\n"
        "    NetImpl() { reset(); }\n"
        "    void reset() override { /* register_parameter, register_module: what the constructor did */ }\n"
        "or a factory: DataParallel<Net>(net, options, [] { return Net(); })");
  }
}

template <typename Items>
void check_names(const Items& module, const Items& copy, const char* what) {
  if (module.size() != copy.size()) {
    throw UsageError(kWhereReplicas,
                     base::concat("the copy has ", copy.size(), " ", what, ", the module ", module.size()),
                     "a factory that makes the module as it is");
  }
  for (std::size_t i = 0; i < module.size(); ++i) {
    const auto& own = module[i];
    const auto& other = copy[i];
    if (own.key() == other.key() && own.value().sizes() == other.value().sizes()) continue;
    throw UsageError(kWhereReplicas,
                     base::concat("the copy's ", what, " are not the module's: got ", other.key(), " ",
                                  other.value().sizes(), ", expected ", own.key(), " ", own.value().sizes()),
                     "a factory that makes the module as it is");
  }
}

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.is_alias_of(b) &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool are_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) { return x.is_same(y); });
}

// Makes `copy` equal to `original`: by sharing its memory, or by its values.
void bring(at::Tensor copy, const at::Tensor& original, c10::Device device, bool share) {
  if (share && original.device() == device) {
    if (!is_same_memory(copy, original)) copy.set_data(original.detach());
    return;
  }
  if (copy.device() != device || copy.scalar_type() != original.scalar_type() ||
      copy.sizes() != original.sizes() || copy.is_alias_of(original)) {
    copy.set_data(original.detach().to(original.options().device(device), !device.is_cpu(), /*copy=*/true));
    return;
  }
  // variable_data() has a version of its own: an earlier forward, whose backward is to come, saved this
  // tensor.
  copy.variable_data().copy_(original.detach(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace

Replicas::Replicas(std::shared_ptr<Module> original, const std::vector<base::Placement>& placements,
                   Make make)
    : original_(std::move(original)), make_(std::move(make)) {
  for (std::size_t i = 0; i < placements.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (placements[j] != placements[i]) continue;
      throw UsageError(kWhereReplicas, base::concat("placement ", placements[i].name, " is given twice"),
                       base::concat(placements[i].name, "/a and ", placements[i].name,
                                    "/b for two places on the same cores"));
    }
    workers_.push_back(PlacementWorker::of(placements[i]));
    names_.emplace_back(base::concat("replica ", i, " on ", placements[i].name));
  }
}

Replicas::Copy Replicas::make_copy() const {
  core::GlobalGeneratorAsFound generator;  // building a module draws initial values that are thrown away
  generator.restore_at_end();
  Copy copy;
  copy.module = make_ ? make_() : clone(*original_);
  if (!copy.module) throw UsageError(kWhereReplicas, "the factory made no module of this type");
  const auto own = original_->named_parameters(), other = copy.module->named_parameters();
  check_names(own, other, "parameters");
  check_names(original_->named_buffers(), copy.module->named_buffers(), "buffers");
  copy.source_of = std::make_shared<StandsFor>();
  for (std::size_t i = 0; i < own.size(); ++i) {
    // Names and sizes are equal, as check_names() has seen, so places are too.
    copy.source_of->emplace_back(other[i].value(), own[i].value());
  }
  copy.buffers = copy.module->buffers();
  copy.modules = copy.module->modules();
  return copy;
}

void Replicas::refresh(std::size_t count) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters = original_->parameters(), buffers = original_->buffers();
  if (!are_same(parameters, parameters_) || !are_same(buffers, buffers_)) {
    copies_.clear();
    parameters_ = std::move(parameters);
    buffers_ = std::move(buffers);
  }
  while (copies_.size() < count) copies_.push_back(make_copy());
  for (std::size_t i = 0; i < count; ++i) refresh_copy(i);
}

void Replicas::refresh_copy(std::size_t i) {
  Copy& copy = copies_[i];
  const c10::Device device = workers_[i]->device();
  for (auto& [leaf, original] : *copy.source_of) {
    bring(leaf, original, device, true);
    if (leaf.requires_grad() != original.requires_grad()) leaf.set_requires_grad(original.requires_grad());
  }
  for (std::size_t j = 0; j < buffers_.size(); ++j) bring(copy.buffers[j], buffers_[j], device, i == 0);
  const auto modules = original_->modules();
  // train() goes down; what lies deeper comes later in the list and has the last word.
  const bool differs =
      !std::equal(modules.begin(), modules.end(), copy.modules.begin(), copy.modules.end(),
                  [](const auto& a, const auto& b) { return a->is_training() == b->is_training(); });
  for (std::size_t j = 0; differs && j < std::min(modules.size(), copy.modules.size()); ++j) {
    copy.modules[j]->train(modules[j]->is_training());
  }
}

// The first copy's buffers are the module's afterwards, as in torch.nn.DataParallel.
void Replicas::keep_buffers() {
  if (copies_.empty()) return;
  const at::NoGradGuard no_grad;
  for (std::size_t j = 0; j < buffers_.size(); ++j) {
    const at::Tensor& first = copies_.front().buffers[j];
    if (!is_same_memory(first, buffers_[j])) buffers_[j].variable_data().copy_(first);
  }
}

}  // namespace cohort::parallel
