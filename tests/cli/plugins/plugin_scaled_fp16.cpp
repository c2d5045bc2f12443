// A hook that sends gradients as Half without overflow. The first collective finds the largest number of all
// ranks. The second sums the numbers divided by it, which lie between -1 and 1.
#include <ATen/ATen.h>
#include <cohort/parallel/comm_hook.h>

#include <chrono>
#include <limits>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace {

class ScaledSum : public cohort::parallel::Reduction {
 public:
  explicit ScaledSum(const cohort::parallel::HookBucket& bucket)
      : group_(bucket.group), timeout_(bucket.timeout), gradients_(bucket.bucket.getBuffer()) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    // NaN becomes infinity, as backends differ in the maximum of NaN. The result is not finite either way.
    largest_ = gradients_.abs().max().nan_to_num(kInfinity, kInfinity).view({1});
    pending_ = group_.all_reduce(largest_, cohort::comm::ReduceOp::MAX, {timeout_});
  }

  bool advance() override {
    pending_.wait();
    if (!travels_.defined()) {
      largest_.masked_fill_(largest_ == 0, 1);
      travels_ = (gradients_ / largest_).to(at::kHalf);
      pending_ = group_.all_reduce(travels_, cohort::comm::ReduceOp::SUM, {timeout_});
      return true;  // another collective was begun
    }
    gradients_.copy_(travels_).mul_(largest_);
    return false;  // the bucket holds the sum
  }

 private:
  const cohort::comm::Group group_;
  const std::chrono::milliseconds timeout_;
  at::Tensor gradients_, largest_, travels_;
  cohort::comm::Pending pending_;
};

COHORT_REGISTER_COMM_HOOK("scaled_fp16", [] {
  return cohort::parallel::CommHook(
      [](const cohort::parallel::HookBucket& bucket) { return std::make_unique<ScaledSum>(bucket); });
});

}  // namespace
