// A gradient M becomes p = M q, which is summed over ranks and made orthonormal; then q = M^T p is summed.
// All ranks hold the same p, so the sum of their q is that of the summed gradient, and p q^T is the result.
// Without a q of the step before, its start is random with a seed of step and place: ranks agree without a
// message. What a rank keeps back is computed with its own q, before the sum. Gradients in full travel beside
// the first factor.
#include "cohort/parallel/power_sgd.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/parallel/internal/coalesce.h"

namespace cohort::parallel {
namespace {

struct Kept {
  at::Tensor q;      // [m, r], of the step before
  at::Tensor error;  // [n, m]: what was not sent
};

struct State {
  PowerSgdOptions options;
  std::int64_t steps = 0;
  std::unordered_map<const at::TensorImpl*, Kept> kept;
};

// A gradient that travels as p [n, r] and q [m, r].
struct Matrix {
  at::Tensor m;  // [n, m] in the bucket, with the error of before added
  at::Tensor p, q;
  Kept* kept = nullptr;
};

at::Tensor start(const at::Tensor& m, std::int64_t rank, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn({m.size(1), rank}, generator, at::TensorOptions(at::kFloat)).to(m.options());
}

class Compressed : public Reduction {
 public:
  Compressed(State& state, const HookBucket& bucket)
      : state_(state), group_(bucket.group), timeout_(bucket.timeout) {
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> gradients = bucket.bucket.getGradients();
    const std::vector<at::Tensor> parameters = bucket.bucket.getParameters();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!add_matrix(gradients[i], parameters[i], i)) whole_.push_back(gradients[i]);
    }
    whole_sums_ = sum(whole_, whole_pending_);
    for (Matrix& each : matrices_) each.p = at::matmul(each.m, each.q);
    sum_factors(&Matrix::p);
  }

  bool advance() override {
    const at::NoGradGuard no_grad;
    factor_pending_.wait();
    if (!has_p_ && !matrices_.empty()) {
      has_p_ = true;
      for (Matrix& each : matrices_) {
        // Q of a QR factorization: the columns of the sum, made orthonormal.
        each.p = std::get<0>(at::linalg_qr(each.p));
        each.q = at::matmul(each.m.t(), each.p);
        if (state_.options.use_error_feedback) {
          each.kept->error = each.m - at::matmul(each.p, each.q.t());  // this rank's own share
        }
      }
      sum_factors(&Matrix::q);
      return true;
    }
    whole_pending_.wait();
    for (std::size_t i = 0; i < whole_.size(); ++i) whole_[i].copy_(whole_sums_[i]);
    for (Matrix& each : matrices_) {
      at::matmul_out(each.m, each.p, each.q.t());
      // A copy: the sum is a view of memory that goes with this reduction.
      if (state_.options.warm_start) each.kept->q = each.q.clone();
    }
    return false;
  }

 private:
  bool add_matrix(const at::Tensor& gradient, const at::Tensor& parameter, std::size_t place) {
    if (gradient.dim() < 2) return false;
    const at::Tensor m = gradient.view({gradient.size(0), -1});
    const std::int64_t rank = std::min({state_.options.matrix_approximation_rank, m.size(0), m.size(1)});
    const auto factors = static_cast<double>(rank * (m.size(0) + m.size(1)));
    // Two factors may be larger than a small or narrow gradient itself.
    if (static_cast<double>(m.numel()) < state_.options.min_compression_rate * factors) return false;
    Kept& kept = state_.kept[parameter.unsafeGetTensorImpl()];
    if (kept.error.defined()) m.add_(kept.error);
    Matrix& matrix = matrices_.emplace_back();
    matrix.m = m;
    matrix.kept = &kept;
    matrix.q =
        kept.q.defined() ? kept.q : start(m, rank, static_cast<std::uint64_t>(state_.steps) * 100003 + place);
    return true;
  }

  // Sums over ranks, once `pending` is over, what is copied into the tensors that are returned.
  std::vector<at::Tensor> sum(const std::vector<at::Tensor>& tensors, comm::Pending& pending) const {
    if (tensors.empty()) return {};
    at::Tensor flat = group_.empty({total_numel(tensors)}, tensors.front().options());
    const std::vector<at::Tensor> pieces = views_of(flat, tensors);
    for (std::size_t i = 0; i < pieces.size(); ++i) pieces[i].copy_(tensors[i]);
    pending = group_.all_reduce(flat, comm::ReduceOp::SUM, {timeout_});
    return pieces;
  }
  void sum_factors(at::Tensor Matrix::*which) {
    std::vector<at::Tensor> factors;
    for (const Matrix& each : matrices_) factors.push_back(each.*which);
    const std::vector<at::Tensor> sums = sum(factors, factor_pending_);
    for (std::size_t i = 0; i < sums.size(); ++i) matrices_[i].*which = sums[i];
  }

  State& state_;
  const comm::Group group_;
  const std::chrono::milliseconds timeout_;
  std::vector<Matrix> matrices_;
  std::vector<at::Tensor> whole_, whole_sums_;
  comm::Pending whole_pending_, factor_pending_;
  bool has_p_ = false;
};

}  // namespace

CommHook power_sgd_hook(const PowerSgdOptions& options) {
  if (options.matrix_approximation_rank < 1 || !(options.min_compression_rate >= 1)) {
    throw UsageError(
        "parallel.power_sgd",
        base::concat("matrix_approximation_rank is ", options.matrix_approximation_rank,
                     " and min_compression_rate ", options.min_compression_rate, ", expected at least 1"));
  }
  const auto state = std::make_shared<State>();
  state->options = options;
  return [state](const HookBucket& bucket) -> std::unique_ptr<Reduction> {
    const bool is_first = bucket.bucket.getIndex() == 0;
    if (is_first) ++state->steps;
    if (state->steps <= state->options.start_iter) return all_reduce_hook()(bucket);
    return std::make_unique<Compressed>(*state, bucket);
  };
}

}  // namespace cohort::parallel
