#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/optim/factory.h"
#include "cohort/optim/schedule.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/rref.h"

/// An optimizer of parameters that lie on several workers.
///
///     rpc::DistributedOptimizer optimizer(parameters, {.name = "sgd", .lr = 0.1, .momentum = 0.9});
///     for (std::int64_t step = 0; step < steps; ++step) {
///       rpc::dist_autograd::Context context;
///       rpc::dist_autograd::backward(context, {loss(model(batch))});
///       optimizer.apply(*schedule, step);
///       optimizer.step(context);
///     }
namespace cohort::rpc {

class OwnerOptimizer;

/// Each owner keeps an optimizer of its own for its parameters, and steps it with the gradients that the
/// context has there. Steps of one process follow each other, whoever asks for them. Threads: one caller at a
/// time.
class DistributedOptimizer {
 public:
  /// Makes an optimizer on each owner of `parameters`: leaves, each given once. `options` name any optimizer
  /// that the owners' programs have. Throws: UsageError for no parameters; what an owner's optimizer throws,
  /// as step().
  explicit DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters,
                                const optim::OptimizerOptions& options = {});
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Has all owners step at once, and waits for all. A parameter without a gradient in the context stays as
  /// it is. grad() of the parameters is not touched. Throws: UsageError for a context of another agent; what
  /// the owner threw that failed; where several failed, a RemoteError with the text of each. The others have
  /// made their step then.
  void step(const dist_autograd::Context& context);

  /// Sets what `schedule` says of step `step` (from 0), for the next step(): for each owner from the rate
  /// that its optimizer began with. Throws: as LRSchedule::apply(); nothing is set then.
  void apply(const optim::LRSchedule& schedule, std::int64_t step);
  /// Sets the learning rate of all owners, for the next step(), which throws if the rate is negative or not
  /// finite.
  void set_lr(double lr);

  /// Returns the state of each owner's optimizer, by the owner's name. Parameters count in the order in which
  /// they were given, among those of the same owner. Throws: as step().
  std::map<std::string, optim::OptimizerState> state() const;
  /// Takes over what state() returned, with its learning rates. Drops what set_lr() and apply() set before.
  /// Throws: DataError where the owners are others, before anything has changed; as step().
  void load_state(const std::map<std::string, optim::OptimizerState>& state);

 private:
  struct Owner {
    std::string name;
    RRef<OwnerOptimizer> optimizer;
    double initial_lr = 0;
    std::optional<double> lr = {};  // for the next step
  };
  void ask_initial_lrs();
  void drop_rates();

  std::vector<Owner> owners_;
  std::optional<double> momentum_;  // for the next step
};

}  // namespace cohort::rpc
