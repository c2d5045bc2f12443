#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>

#include <vector>

#include "cohort/models/registry.h"

/// What the benchmarks of DistributedDataParallel share.
namespace cohort::bench {

/// A model of cohort::models, and what one rank gives it in a step.
struct Workload {
  const char* name;
  std::int64_t batch, size;  ///< images, of size x size
};

class Net {
 public:
  explicit Net(const Workload& work) {
    at::manual_seed(1);
    models::ModelOptions options{.name = work.name, .num_classes = 1000, .extra = {}};
    options.image_size = work.size;
    model_ = models::make_model(options);
    input_ = at::rand({work.batch, 3, work.size, work.size});
    target_ = at::randint(1000, {work.batch}, at::kLong);
  }
  std::vector<at::Tensor> parameters() { return model_.ptr()->parameters(); }
  const torch::nn::Module& module() { return *model_.ptr(); }
  at::Tensor loss() { return loss_of(input_, target_); }
  at::Tensor loss_of(const at::Tensor& input, const at::Tensor& target) {
    return at::cross_entropy_loss(model_.forward<at::Tensor>(input), target);
  }
  const at::Tensor& input() const { return input_; }
  const at::Tensor& target() const { return target_; }
  void zero_grad() { model_.ptr()->zero_grad(); }

 private:
  torch::nn::AnyModule model_;
  at::Tensor input_, target_;
};

}  // namespace cohort::bench
