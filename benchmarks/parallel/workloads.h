#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/models/registry.h"

/// What the benchmarks of DistributedDataParallel share.
namespace cohort::bench {

/// Seconds.
struct Times {
  double min = 0, median = 0, p99 = 0;
};

inline Times times_of(std::vector<double> list) {
  std::sort(list.begin(), list.end());
  return {list.front(), list[list.size() / 2],
          list[static_cast<std::size_t>(0.99 * static_cast<double>(list.size() - 1))]};
}

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
  at::Tensor loss() { return at::cross_entropy_loss(model_.forward<at::Tensor>(input_), target_); }
  void zero_grad() { model_.ptr()->zero_grad(); }

 private:
  torch::nn::AnyModule model_;
  at::Tensor input_, target_;
};

/// c10d's reducer with the bucket sizes of Python's DistributedDataParallel.
inline std::shared_ptr<c10d::Reducer> make_c10d(Net& net, const comm::Group& group) {
  const auto parameters = net.parameters();
  constexpr std::int64_t kFirst = 1 << 20, kCap = 25 << 20;
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {kFirst, kCap});
  std::reverse(buckets.begin(), buckets.end());
  return std::make_shared<c10d::Reducer>(
      parameters, buckets, group.process_group(), std::vector<bool>(parameters.size(), false), kCap, false,
      true, std::unordered_map<size_t, std::string>(), kFirst, false, false, std::vector<std::int64_t>());
}

}  // namespace cohort::bench
