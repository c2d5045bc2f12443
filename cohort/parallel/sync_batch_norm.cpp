// Each rank sends its mean, its squared deviations and its count; every rank joins all of them in the order
// of ranks. So all ranks get the same bits, on the CPU in float64. The mean over all is formed first, and
// each rank's deviations are then moved to it, as in Chan et al. Backward sums two values per channel over
// ranks for the input's gradient; the gradients of weight and bias stay this rank's own. On a GPU LibTorch's
// kernels do the same, and rows of ranks without values are left out.
#include "cohort/parallel/sync_batch_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ostream>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/comm/text_collectives.h"

namespace cohort::parallel {
namespace {

using torch::autograd::AutogradContext;

constexpr const char* kWhereSyncBatchNorm = "parallel.sync_batch_norm";

// One forward, beside its tensors.
struct BatchNormArguments {
  const comm::Group& group;
  at::Tensor running_mean, running_var;  // undefined: not tracked
  double momentum;
  double eps;
};

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(comm::Group of) : group(std::move(of)) {}
  comm::Group group;
};

// What was found over all ranks. `counts`: values per channel of each rank; on a GPU of those that have any.
struct Statistics {
  at::Tensor mean, invstd, counts;
  at::Tensor var;  // biased; on the CPU only
};

std::int64_t values_per_channel(const at::Tensor& x) {
  return x.size(1) == 0 ? 0 : x.numel() / x.size(1);
}

// Half and bfloat16 are summed, and their statistics kept, in float.
at::ScalarType wide(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type()) ? at::kFloat : x.scalar_type();
}

at::Tensor as(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(type) : tensor;
}

// A value for each channel, as a factor of `x`.
at::Tensor over(const at::Tensor& per_channel, const at::Tensor& x) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  shape[1] = x.size(1);
  return per_channel.view(shape);
}

// `message` of each rank, a row for each.
at::Tensor gather_rows(const comm::Group& group, const at::Tensor& message) {
  at::Tensor all = at::empty({group.size(), message.numel()}, message.options());
  at::Tensor flat = all.view(-1);
  group.all_gather(flat, message).wait();
  return all;
}

void require_more_than_one(double total, int ranks) {
  if (total > 1) return;
  throw UsageError(kWhereSyncBatchNorm,
                   base::concat("got ", total, " value per channel over ", base::format_count(ranks, "rank"),
                                ", expected more than 1 in training"),
                   "a larger batch, or eval()");
}

// Chan et al. 1983, for as many parts as there are ranks: the mean first, then each part's own deviations
// and those of its mean. In the order of ranks, in float64.
Statistics join_on_cpu(const at::Tensor& x, const BatchNormArguments& plan) {
  const std::int64_t channels = x.size(1), count = values_per_channel(x);
  at::Tensor message = at::zeros({2 * channels + 1}, at::kDouble);  // mean | squared deviations | count
  if (count > 0) {
    const auto [mean, var] = at::batch_norm_update_stats(x.to(wide(x)), {}, {}, 0);
    message.narrow(0, 0, channels).copy_(mean);
    message.narrow(0, channels, channels).copy_(var.to(at::kDouble).mul_(static_cast<double>(count)));
    message[2 * channels].fill_(count);
  }
  const at::Tensor rows = gather_rows(plan.group, message);
  const at::Tensor counts = rows.select(1, 2 * channels).contiguous();
  const double* const n = counts.const_data_ptr<double>();
  double total = 0;
  for (int rank = 0; rank < plan.group.size(); ++rank) total += n[rank];
  require_more_than_one(total, plan.group.size());

  at::Tensor mean = at::zeros({channels}, at::kDouble), squares = at::zeros({channels}, at::kDouble);
  for (int rank = 0; rank < plan.group.size(); ++rank) {
    mean.add_(rows[rank].narrow(0, 0, channels), n[rank] / total);
  }
  for (int rank = 0; rank < plan.group.size(); ++rank) {
    const at::Tensor deviation = rows[rank].narrow(0, 0, channels) - mean;
    squares.add_(rows[rank].narrow(0, channels, channels)).add_(deviation.square_(), n[rank]);
  }
  if (plan.running_mean.defined()) {
    const auto move = [&](const at::Tensor& running, const at::Tensor& value) {
      running.copy_(running.to(at::kDouble).mul_(1 - plan.momentum).add_(value, plan.momentum));
    };
    move(plan.running_mean, mean);
    // As in torch.nn.BatchNorm: unbiased where it runs, biased where it normalizes.
    move(plan.running_var, squares / (total - 1));
  }
  const at::Tensor var = squares / total;
  return {mean.to(wide(x)), (var + plan.eps).rsqrt_().to(wide(x)), counts, var.to(wide(x))};
}

at::Tensor normalize_on_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const Statistics& all, double eps) {
  const at::ScalarType type = wide(x);
  return std::get<0>(at::native_batch_norm(x, as(weight, type), as(bias, type), all.mean, all.var,
                                           /*training=*/false, 0, eps));
}

// Sums of dy and of dy (x - mean) over this rank's values: [2 C], in float64 on the CPU.
at::Tensor sums_on_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean) {
  if (x.numel() == 0) return at::zeros({2 * x.size(1)}, at::kDouble);
  // With a deviation of one, the gradient of the weight is the second sum.
  const auto [none, products, sums] = at::native_batch_norm_backward(
      dy, x, {}, {}, {}, mean, at::ones_like(mean), /*train=*/true, 0, {false, true, true});
  return at::cat({sums, products}).to(at::kDouble);
}

at::Tensor input_gradient_on_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                 const Statistics& all, const at::Tensor& sums) {
  const at::Tensor means = sums / all.counts.sum().item<double>();
  const at::Tensor invstd = all.invstd.to(at::kDouble);
  const at::Tensor scale = weight.defined() ? invstd * weight : invstd;
  const at::Tensor slope = means.narrow(0, x.size(1), x.size(1)) * invstd.square() * scale;
  const at::Tensor shift = means.narrow(0, 0, x.size(1)) * scale;
  const auto factor = [&](const at::Tensor& value) { return over(value.to(x.scalar_type()), x); };
  // (dy - mean(dy) - (x - mean) mean(dy (x - mean)) / var) weight / std
  return (x - over(all.mean, x)).mul_(factor(-slope)).addcmul_(dy, factor(scale)).sub_(factor(shift));
}

// On a GPU: LibTorch's own kernels for this, as torch.nn.SyncBatchNorm calls them.
Statistics join_on_gpu(const at::Tensor& x, const BatchNormArguments& plan) {
  const std::int64_t channels = x.size(1), count = values_per_channel(x);
  at::Tensor message = at::zeros({2 * channels + 1}, x.options().dtype(wide(x)));  // mean | invstd | count
  if (count > 0) {
    const auto [mean, invstd] = at::batch_norm_stats(x, plan.eps);
    message = at::cat({mean, invstd, at::full({1}, count, mean.options())});
  }
  at::Tensor rows = gather_rows(plan.group, message);
  rows = rows.index_select(0, rows.select(1, 2 * channels).nonzero().view(-1));
  const at::Tensor counts = rows.select(1, 2 * channels).contiguous();
  require_more_than_one(counts.sum().item<double>(), plan.group.size());
  const at::Tensor counts_like_running =
      plan.running_mean.defined() ? counts.to(plan.running_mean.scalar_type()) : counts;
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(
      x, rows.narrow(1, 0, channels).contiguous(), rows.narrow(1, channels, channels).contiguous(),
      optional(plan.running_mean), optional(plan.running_var), plan.momentum, plan.eps, counts_like_running);
  return {mean, invstd, counts.to(at::kInt), {}};
}

struct SyncBatchNorm : torch::autograd::Function<SyncBatchNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                            const BatchNormArguments& plan) {
    const at::Tensor x = input.contiguous(input.suggest_memory_format());
    const at::Tensor w = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
    const Statistics all = x.is_cuda() ? join_on_gpu(x, plan) : join_on_cpu(x, plan);
    context->save_for_backward({x, w, all.mean, all.invstd, all.counts});
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(plan.group));
    // A rank without samples has sent its count of 0, as the others wait for it.
    if (x.numel() == 0) return at::empty_like(x);
    return x.is_cuda() ? at::batch_norm_elemt(x, weight, bias, all.mean, all.invstd, plan.eps)
                       : normalize_on_cpu(x, w, b, all, plan.eps);
  }

  static torch::autograd::variable_list backward(AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw UsageError(kWhereSyncBatchNorm,
                       "backward with create_graph: the gradient over ranks has no graph",
                       "torch::nn::BatchNorm where second derivatives are taken");
    }
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const Statistics all{saved[2], saved[3], saved[4], {}};
    const auto holder = context->saved_data["group"].toCapsule();
    const comm::Group& group = static_cast<const GroupHolder&>(*holder).group;
    const at::Tensor dy = gradients[0].contiguous(x.suggest_memory_format());
    const bool for_input = context->needs_input_grad(0);
    return x.is_cuda() ? on_gpu(group, dy, x, weight, all, for_input)
                       : on_cpu(group, dy, x, weight, all, for_input);
  }

  static torch::autograd::variable_list on_cpu(const comm::Group& group, const at::Tensor& gradient,
                                               const at::Tensor& input, const at::Tensor& weight,
                                               const Statistics& all, bool for_input) {
    const std::int64_t channels = input.size(1);
    const at::Tensor x = input.to(wide(input)), dy = gradient.to(wide(input));
    at::Tensor sums = sums_on_cpu(dy, x, all.mean);
    torch::autograd::variable_list result(4);
    if (weight.defined()) {
      result[1] = (sums.narrow(0, channels, channels) * all.invstd).to(weight.scalar_type());
      // A copy, since the all-reduce below changes `sums`.
      result[2] = sums.narrow(0, 0, channels).to(weight.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    if (for_input) {
      group.all_reduce(sums).wait();
      result[0] = input_gradient_on_cpu(dy, x, weight, all, sums).to(input.scalar_type());
    }
    return result;
  }

  static torch::autograd::variable_list on_gpu(const comm::Group& group, const at::Tensor& dy,
                                               const at::Tensor& x, const at::Tensor& weight,
                                               const Statistics& all, bool for_input) {
    const std::int64_t channels = x.size(1);
    torch::autograd::variable_list result(4);
    at::Tensor sums = at::zeros({2 * channels}, all.mean.options());
    if (x.numel() > 0) {
      at::Tensor sum_dy, sum_dy_xmu;
      std::tie(sum_dy, sum_dy_xmu, result[1], result[2]) = at::batch_norm_backward_reduce(
          dy, x, all.mean, all.invstd, weight, for_input, weight.defined(), weight.defined());
      if (for_input) sums = at::cat({sum_dy, sum_dy_xmu});
    } else if (weight.defined()) {
      result[1] = at::zeros_like(weight);
      result[2] = at::zeros_like(weight);
    }
    if (!for_input) return result;
    group.all_reduce(sums).wait();
    result[0] = x.numel() == 0
                    ? at::empty_like(x)
                    : at::batch_norm_backward_elemt(
                          dy, x, all.mean, all.invstd, as(weight, all.mean.scalar_type()),
                          sums.narrow(0, 0, channels), sums.narrow(0, channels, channels), all.counts);
    return result;
  }
};

}  // namespace

template <std::size_t D, typename Derived>
SyncBatchNormImplBase<D, Derived>::SyncBatchNormImplBase(const torch::nn::BatchNormOptions& options,
                                                         comm::Group group)
    : torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>(options), group_(std::move(group)) {
  if (!group_) throw UsageError(kWhereSyncBatchNorm, "this process is not in the group");
}

template <std::size_t D, typename Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const at::Tensor& input) {
  const auto dims = static_cast<std::size_t>(input.dim());
  const bool fits = D == 1 ? dims == 2 || dims == 3 : dims == D + 2;
  if (!fits || input.size(1) != this->options.num_features()) {
    throw UsageError(
        kWhereSyncBatchNorm,
        base::concat("got an input ", input.sizes(), ", expected ", D == 1 ? "2 or 3" : std::to_string(D + 2),
                     " dimensions and ", this->options.num_features(), " channels"));
  }
}

template <std::size_t D, typename Derived>
at::Tensor SyncBatchNormImplBase<D, Derived>::forward(const at::Tensor& input) {
  this->_check_input_dim(input);
  const auto& options = this->options;
  const bool tracks = options.track_running_stats();
  double momentum = options.momentum().value_or(0.0);
  if (this->is_training() && tracks) {
    this->num_batches_tracked += 1;
    // Without a momentum the running statistics are the mean of all batches.
    if (!options.momentum()) momentum = 1.0 / this->num_batches_tracked.template item<double>();
  }
  if (!this->is_training() || group_.size() == 1) {
    if (this->is_training()) require_more_than_one(static_cast<double>(values_per_channel(input)), 1);
    return torch::nn::functional::detail::batch_norm(input, this->running_mean, this->running_var,
                                                     this->weight, this->bias, this->is_training() || !tracks,
                                                     momentum, options.eps());
  }
  // Once, since it is an exchange of texts.
  if (!agreed_) {
    comm::require_same(group_, "a SyncBatchNorm",
                       base::concat(options.num_features(), " channels of ", input.scalar_type(), ", eps ",
                                    options.eps(), ", track_running_stats ", tracks));
  }
  agreed_ = true;
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return SyncBatchNorm::apply(
      input, optional(this->weight), optional(this->bias),
      BatchNormArguments{group_, this->running_mean, this->running_var, momentum, options.eps()});
}

template <std::size_t D, typename Derived>
void SyncBatchNormImplBase<D, Derived>::share_buffers(const at::Tensor& mean, const at::Tensor& var,
                                                      const at::Tensor& batches) {
  if (!this->options.track_running_stats()) return;
  // Buffers, unlike parameters, are registered privately: what is there gets the other's storage.
  this->running_mean.set_data(mean);
  this->running_var.set_data(var);
  this->num_batches_tracked.set_data(batches);
}

template <std::size_t D, typename Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "cohort::parallel::SyncBatchNorm" << D << "d(" << this->options.num_features()
         << ", eps=" << this->options.eps() << ", ranks=" << group_.size() << ")";
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace cohort::parallel
