#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "cohort/optim/factory.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/remote_module.h"
#include "shard.h"

/// Both make the same steps: over two workers, and in this process alone.

inline const cohort::optim::OptimizerOptions kOptimizer{.name = "sgd", .lr = 0.05};

struct Batch {
  at::Tensor images, labels;  // [N, 3, size, size]; [N, kClasses], of which one is 1
};

/// What the shards have after training, first the first one's.
using State = std::vector<at::Tensor>;

class Remote {
 public:
  // The loss before the step.
  double step(const Batch& batch, std::int64_t splits) {
    cohort::rpc::dist_autograd::Context context;
    std::vector<cohort::rpc::Future<at::Tensor>> futures;
    for (const at::Tensor& images : batch.images.chunk(splits)) {
      // The first shard's result goes straight from it to the second shard.
      const auto hidden = in_order(first_).remote<&ShardImpl::forward>(cohort::rpc::make_rref(images));
      futures.push_back(in_order(second_).rpc_async<&ShardImpl::forward>(hidden));
    }
    std::vector<at::Tensor> outputs;
    for (auto& future : futures) outputs.push_back(future.get());
    const at::Tensor loss = at::mse_loss(at::cat(outputs), batch.labels);
    cohort::rpc::dist_autograd::backward(context, {loss});
    optimizer_.step(context);
    return loss.item<double>();
  }
  State state() const {
    State all;
    for (const auto* const shard : {&first_, &second_}) {
      for (const auto& parameter : shard->parameters()) all.push_back(parameter.to_here());
      for (const at::Tensor& each : shard->rref().rpc_sync<&ShardImpl::statistics>()) all.push_back(each);
    }
    return all;
  }

 private:
  // Each micro-batch moves the running statistics of batch norm: in another order they get other bits.
  static cohort::rpc::RRef<ShardImpl> in_order(const cohort::rpc::RemoteModule<ShardImpl>& shard) {
    return shard.rref().in_order("micro-batches");
  }
  std::vector<cohort::rpc::RRef<at::Tensor>> parameters() const {
    std::vector<cohort::rpc::RRef<at::Tensor>> all = first_.parameters();
    for (auto& parameter : second_.parameters()) all.push_back(parameter);
    return all;
  }

  cohort::rpc::RemoteModule<ShardImpl> first_ = cohort::rpc::remote_module<make_shard>("shard/1", true),
                                       second_ = cohort::rpc::remote_module<make_shard>("shard/2", false);
  cohort::rpc::DistributedOptimizer optimizer_{parameters(), kOptimizer};
};

/// The same in this process alone.
class Alone {
 public:
  double step(const Batch& batch, std::int64_t splits) {
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& images : batch.images.chunk(splits)) {
      outputs.push_back(second_->run(first_->run(images)));
    }
    optimizer_->zero_grad();
    const at::Tensor loss = at::mse_loss(at::cat(outputs), batch.labels);
    loss.backward();
    optimizer_->step();
    return loss.item<double>();
  }
  State state() const {
    State all;
    for (const ShardImpl* const shard : {first_.get(), second_.get()}) {
      for (const at::Tensor& parameter : shard->parameters()) all.push_back(parameter);
      for (const at::Tensor& each : shard->statistics()) all.push_back(each);
    }
    return all;
  }

 private:
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = first_->parameters();
    for (const at::Tensor& parameter : second_->parameters()) all.push_back(parameter);
    return all;
  }

  const std::shared_ptr<ShardImpl> first_ = make_shard(true), second_ = make_shard(false);
  const std::unique_ptr<cohort::optim::Optimizer> optimizer_ =
      cohort::optim::make_optimizer(kOptimizer, {{.params = parameters()}});
};
