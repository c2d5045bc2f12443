#include "cohort/parallel/distributed.h"

#include "cohort/core/error.h"
#include "cohort/parallel/replicate.h"

namespace cohort::parallel {
namespace {

// Before the module's parameters are looked at: what differs is named as the user knows it.
std::shared_ptr<torch::nn::Module> made_alike(std::shared_ptr<torch::nn::Module> module,
                                              const comm::Group& group, const DistributedOptions& options) {
  if (!group) throw UsageError("parallel.DistributedDataParallel", "this process is not in the group");
  if (options.init_sync && group.size() > 1)
    broadcast_module(group, *module, {options.ignored, options.timeout});
  return module;
}

}  // namespace

Distributed::Distributed(std::shared_ptr<torch::nn::Module> module, comm::Group group,
                         DistributedOptions options)
    : module_(made_alike(std::move(module), group, options)),
      options_(options),
      reducer_(std::move(group), parameters_to_reduce(*module_, options.ignored), options) {}

void Distributed::before_forward() {
  if (reducer_.group().size() == 1 || !module_->is_training() || !at::GradMode::is_enabled() ||
      reducer_.is_silent()) {
    return;
  }
  reducer_.regroup();
  if (options_.broadcast_buffers)
    broadcast_buffers(reducer_.group(), *module_, {options_.ignored, options_.timeout});
}

void Distributed::after_forward(std::span<const at::Tensor> outputs) {
  if (!at::GradMode::is_enabled() || reducer_.is_silent()) return;
  if (weight_) {
    reducer_.prepare(Contribution{.weight = *weight_}, outputs);
  } else {
    reducer_.prepare(outputs);
  }
}

}  // namespace cohort::parallel
