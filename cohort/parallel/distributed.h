#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/core/nested.h"
#include "cohort/parallel/broadcast.h"
#include "cohort/parallel/reducer.h"

/// Any module on several ranks: docs/guide/distributed.md.
namespace cohort::parallel {

/// PyTorch's options under PyTorch's names; bucket_cap_mb and what concerns buckets are in ReducerOptions.
struct DistributedOptions : ReducerOptions {
  /// Gives every rank rank 0's parameters and buffers at the start.
  bool init_sync = true;
  /// Gives every rank the buffers, such as running statistics, that rank 0 has after forward, by the end of
  /// each backward that reduces. They stay each rank's own where a forward came after it.
  bool broadcast_buffers = true;
  /// Parameters and buffers, by name, that stay each rank's own.
  std::vector<std::string> ignored = {};
};

/// What join() does for ranks that end early.
struct JoinOptions {
  /// Gradients are divided by all ranks, also by those that have no more samples; off: by those that have.
  /// Where ranks weigh by their samples it has no effect.
  bool divide_by_initial_world_size = true;
  /// Throws on all ranks as soon as one of them has ended.
  bool throw_on_early_termination = false;
};

/// What DistributedDataParallel does that needs no type of the module.
class Distributed {
 public:
  /// `module` is shared. Collective. Throws: UsageError naming what differs between the ranks.
  Distributed(std::shared_ptr<torch::nn::Module> module, comm::Group group, DistributedOptions options = {});
  Distributed(const Distributed&) = delete;
  Distributed& operator=(const Distributed&) = delete;

  /// Before forward. Collective within join(), with gradients on and without no_sync(); else nothing travels.
  void before_forward();
  /// After it, with what it returned: has the next backward reduce, unless no_sync() or no gradients.
  void after_forward(std::span<const at::Tensor> outputs);
  /// This rank's samples in the next forwards, until told otherwise; without it all ranks weigh the same.
  /// Collective: on every rank or none.
  void set_weight(std::optional<double> samples) { weight_ = samples; }
  /// Takes part in a step for which this rank has no samples. Collective, but under no_sync(), where it does
  /// nothing. Blocks.
  void step_without_samples();

  /// DistributedDataParallel::synchronize_buffers().
  void synchronize_buffers();
  /// DistributedDataParallel::join().
  void join(const std::function<void()>& loop, const JoinOptions& options);

  /// What reduces the gradients: for its buckets, reports and no_sync().
  Reducer& reducer() { return reducer_; }

 private:
  std::vector<std::int64_t> who_continues(bool has_samples) const;
  bool sends_buffers() const { return options_.broadcast_buffers && reducer_.group().size() > 1; }
  void prepare(const std::optional<StepInfo>& info, std::span<const at::Tensor> outputs);
  void shadow();

  std::shared_ptr<torch::nn::Module> module_;
  DistributedOptions options_;
  std::optional<double> weight_;
  std::optional<JoinOptions> joining_;
  bool has_stepped_ = false;
  std::int64_t joined_steps_ = 0;
  Reducer reducer_;
  BufferBroadcast buffers_;
};

/// Wraps a module so that backward leaves the mean of all ranks' gradients: each rank computes with its own
/// samples, and all make the same step.
///
///     auto group = comm::init_process_group();
///     parallel::DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(10, 10), group);
///     auto loss = torch::mse_loss(model.forward(x), y);
///     loss.backward();                                    // reduces, bucket by bucket, while it runs
///     optimizer.step();
///
/// M: a module holder, a shared_ptr to a module, or AnyModule's like with a forward(). Arguments and results
/// are passed on as they are; what a result is made of core's visitor must know (core/nested.h).
/// Collective: constructor, and each backward that reduces: the first after a forward with gradients on, in
/// training or in evaluation mode. A forward is not, so that one rank may make one alone.
/// Ownership: shares the module and the group. Threads: one caller at a time.
/// Throws: as Reducer.
template <typename M>
class DistributedDataParallel {
 public:
  DistributedDataParallel(M module, comm::Group group, DistributedOptions options = {})
      : module_(std::move(module)),
        distributed_(std::make_unique<Distributed>(pointer(module_), std::move(group), std::move(options))) {}

  /// Calls the module's forward(), and has the next backward reduce the gradients over the ranks. Collective
  /// under join(); else nothing travels before backward.
  template <typename... Args>
  auto forward(Args&&... args) {
    const auto plain = [&](auto&&... given) { return module_->forward(std::forward<Args>(given)...); };
    return forward_by(plain, std::forward<Args>(args)...);
  }
  /// The same by `fn`, which computes what the module's forward does: script::script(module), for instance.
  template <typename Fn, typename... Args>
  auto forward_by(Fn& fn, Args&&... args) {
    distributed_->before_forward();
    auto result = fn(std::forward<Args>(args)...);
    distributed_->after_forward(core::flatten_tensors(result));
    return result;
  }
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the guard lives, backwards add up this rank's gradients alone: accumulation.
  [[nodiscard]] Reducer::NoSync no_sync() { return Reducer::NoSync(distributed_->reducer()); }
  /// Samples of this rank in the next forwards: Distributed::set_weight.
  void set_weight(std::optional<double> samples) { distributed_->set_weight(samples); }
  /// Takes part in a step for which this rank has no samples; under no_sync() it does nothing. Blocks.
  void step_without_samples() { distributed_->step_without_samples(); }

  /// Gives every rank rank 0's buffers now. For evaluation after forwards that no reduction followed, such as
  /// those under no_sync(). Not between a forward and its backward, which may read them. Collective. Blocks.
  void synchronize_buffers() { distributed_->synchronize_buffers(); }

  /// Runs a training loop that may have other numbers of steps on the ranks: a rank that has ended takes part
  /// in the others' steps, without samples, until all have; then all have the parameters and buffers of the
  /// rank that had samples for longest. Each forward in `loop` with gradients on, and not under no_sync(), is
  /// followed by a backward, in training and in evaluation mode. Collective. Throws: what `loop` throws;
  /// UsageError on every rank where JoinOptions ask for it.
  void join(const std::function<void()>& loop, const JoinOptions& options = {}) {
    distributed_->join(loop, options);
  }

  /// The module itself: its parameters have their own names.
  M& module() { return module_; }
  auto operator->() { return pointer(module_).get(); }
  /// What reduces the gradients.
  Reducer& reducer() { return distributed_->reducer(); }

 private:
  static auto pointer(const M& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }

  M module_;
  std::unique_ptr<Distributed> distributed_;
};

}  // namespace cohort::parallel
