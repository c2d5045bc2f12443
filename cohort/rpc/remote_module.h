#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "cohort/rpc/init.h"
#include "cohort/rpc/rref.h"

/// Modules that lie on another worker.
///
///     struct EncoderImpl : torch::nn::Module { at::Tensor forward(const at::Tensor& words); ... };
///     std::shared_ptr<EncoderImpl> make_encoder(std::int64_t words);
///     COHORT_REMOTE(make_encoder);
///     COHORT_REMOTE_MODULE(EncoderImpl);
///
///     const auto encoder = rpc::remote_module<make_encoder>("ps/0", 10'000);
///     at::Tensor x = encoder.forward(words);
///     rpc::DistributedOptimizer optimizer(encoder.parameters());
namespace cohort::rpc {

/// On the owner of `module`: references to its parameters, in their order.
template <typename M>
std::vector<RRef<at::Tensor>> module_parameters(const RRef<M>& module) {
  std::vector<RRef<at::Tensor>> references;
  for (const at::Tensor& parameter : module.local_value()->parameters())
    references.push_back(make_rref(parameter));
  return references;
}

/// On the owner of `module`: M::train(on).
template <typename M>
void set_training(const RRef<M>& module, bool on) {
  module.local_value()->train(on);
}

/// A module that some worker keeps, as long as anybody has a reference to it. Throws: as RRef. Threads: as
/// RRef.
template <typename M>
class RemoteModule {
 public:
  RemoteModule() = default;
  explicit RemoteModule(RRef<M> module) : module_(std::move(module)) {}

  /// The reference to the module itself.
  const RRef<M>& rref() const { return module_; }
  /// The worker that keeps the module.
  const WorkerInfo& owner() const { return module_.owner(); }

  /// M::forward on the owner. A context records it.
  template <typename... Args>
  auto forward(Args&&... args) const {
    return forward_async(std::forward<Args>(args)...).get();
  }
  /// M::forward on the owner; returns a Future of what it returns.
  template <typename... Args>
  auto forward_async(Args&&... args) const {
    return module_.template rpc_async<&M::forward>(std::forward<Args>(args)...);
  }
  /// References to its parameters, in their order: for DistributedOptimizer.
  std::vector<RRef<at::Tensor>> parameters() const {
    return module_.template rpc_sync<&module_parameters<M>>();
  }
  /// Sets the module to training, or to evaluation.
  void train(bool on = true) const { module_.template rpc_sync<&set_training<M>>(on); }
  /// Sets the module to evaluation.
  void eval() const { train(false); }

 private:
  RRef<M> module_;
};

/// Has `worker` make a module by `factory`, a registered function that returns a shared_ptr or a
/// ModuleHolder. Returns at once: what the factory throws is thrown by the first use.
template <auto factory, typename... Args>
auto remote_module(Agent& agent, const Target& worker, Args&&... args) {
  RRef module = agent.remote<factory>(worker, std::forward<Args>(args)...);
  return RemoteModule(std::move(module));
}
/// The same by the process's agent.
template <auto factory, typename... Args>
auto remote_module(const Target& worker, Args&&... args) {
  return remote_module<factory>(*rpc::shared_agent(), worker, std::forward<Args>(args)...);
}

}  // namespace cohort::rpc

/// COHORT_REMOTE_MODULE(EncoderImpl): beside COHORT_REMOTE of its factory, in a source that each program of
/// the job has.
#define COHORT_REMOTE_MODULE(...)                             \
  COHORT_REMOTE(__VA_ARGS__::forward);                        \
  COHORT_REMOTE(cohort::rpc::module_parameters<__VA_ARGS__>); \
  COHORT_REMOTE(cohort::rpc::set_training<__VA_ARGS__>)
