#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <cstddef>

#include "cohort/comm/group.h"

/// Batch norm over the batch of all ranks: docs/guide/parallel.md.
///
///     bn = register_module("bn", parallel::SyncBatchNorm2d(64, group));        // in a module of your own
///     parallel::convert_sync_batch_norm(*model, group);                        // convert_sync_batch_norm.h
namespace cohort::parallel {

/// What the three modules below share.
template <std::size_t D, typename Derived>
class SyncBatchNormImplBase : public torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImplBase(const torch::nn::BatchNormOptions& options, comm::Group group);
  /// Normalises by the statistics of all ranks' batches in training. In evaluation by the running ones; where
  /// none are tracked, by those of this rank's input. Collective in training. Shapes and Throws: as the
  /// modules below.
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  /// The ranks whose batches count as one.
  const comm::Group& group() const { return group_; }
  /// Makes the parameters, the statistics and the mode those of `norm`, shared, not copied.
  template <typename Norm>
  void share(const Norm& norm) {
    const auto take = [](at::Tensor& member, at::Tensor& registered, const at::Tensor& tensor) {
      member = registered = tensor;
    };
    if (norm.options.affine()) {
      take(this->weight, this->parameters_["weight"], norm.weight);
      take(this->bias, this->parameters_["bias"], norm.bias);
    }
    share_buffers(norm.running_mean, norm.running_var, norm.num_batches_tracked);
    this->train(norm.is_training());
  }

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  void share_buffers(const at::Tensor& mean, const at::Tensor& var, const at::Tensor& batches);
  comm::Group group_;
  bool agreed_ = false;  // the ranks have compared what they are
};

/// torch::nn::BatchNorm1d whose statistics, in training, are those of the samples of all ranks together; the
/// same names, options, state and initial values, and equal to it in evaluation and on one rank.
/// Shapes: [N, C] or [N, C, L]; N may differ between ranks and be 0, C may not. Keeps the memory format.
/// Numbers: a rank's mean and sum of squared deviations are joined in float64, in the order of ranks, so
/// running statistics have the same bits on all ranks. The gradients of weight and bias are this rank's
/// share: who averages gradients averages them too (with uneven shares: docs/guide/parallel.md).
/// Collective: every rank calls forward, and backward, in the same order; one all-gather of 2 C + 1 numbers
/// in forward, one all-reduce of 2 C in backward, which is left out where the input needs no gradient. The
/// first forward also compares the ranks' channels and options. Blocks until both are done.
/// Ownership: shares `group`, and so do clones. Threads: one caller at a time per group.
/// Throws: UsageError for another number of dimensions or channels, for one value per channel over all ranks,
/// where ranks differ, in backward with create_graph; what Group throws.
/// Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; joined as in Chan, Golub and LeVeque,
/// "Algorithms for Computing the Sample Variance", The American Statistician 37, 1983.
class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm1d);

/// The same for torch::nn::BatchNorm2d. Shapes: [N, C, H, W].
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm2d);

/// The same for torch::nn::BatchNorm3d. Shapes: [N, C, D, H, W].
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm3d);

extern template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
extern template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
extern template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace cohort::parallel
