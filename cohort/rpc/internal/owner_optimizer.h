#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/optim/factory.h"
#include "cohort/rpc/codec.h"
#include "cohort/rpc/context_id.h"
#include "cohort/rpc/rref.h"

/// What DistributedOptimizer has on each owner.
namespace cohort::rpc {

template <>
struct Codec<optim::OptimizerOptions> {
  static void write(Writer& out, const optim::OptimizerOptions& value);
  static optim::OptimizerOptions read(Reader& in);
  static void describe(TypeText& text);
};

template <>
struct Codec<optim::OptimizerState> {
  static void write(Writer& out, const optim::OptimizerState& value);
  static optim::OptimizerState read(Reader& in);
  static void describe(TypeText& text);
};

/// Steps parameters of this worker, and leaves their grad() alone. Threads: any.
class OwnerOptimizer {
 public:
  OwnerOptimizer(std::vector<at::Tensor> parameters, const optim::OptimizerOptions& options);

  /// Steps with the gradients that the context has here; parameters without one stay.
  void step(dist_autograd::ContextId context, std::optional<double> lr, std::optional<double> momentum);
  double initial_lr() const;
  optim::OptimizerState state() const;
  void load_state(const optim::OptimizerState& state);

 private:
  const std::vector<at::Tensor> parameters_, own_;  // `own_`: with the same memory, and a grad() of their own
  const std::unique_ptr<optim::Optimizer> optimizer_;
};

/// The owner of `parameters` calls it.
std::shared_ptr<OwnerOptimizer> make_owner_optimizer(const std::vector<RRef<at::Tensor>>& parameters,
                                                     const optim::OptimizerOptions& options);

}  // namespace cohort::rpc
