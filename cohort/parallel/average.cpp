#include "cohort/parallel/average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "cohort/core/error.h"
#include "cohort/parallel/replicate.h"

namespace cohort::parallel {

// Gradients that lie one after the other in `flat`.
struct GradientAverager::Chunk {
  std::string key;
  std::vector<at::Tensor> parameters;
  std::int64_t numel = 0;
  at::Tensor flat;
};

GradientAverager::GradientAverager(comm::Group group, AverageOptions options)
    : group_(std::move(group)), options_(options) {
  if (!group_) throw UsageError("parallel.average", "this process is not in the group");
  if (options_.chunk_bytes < 1) {
    throw UsageError("parallel.average",
                     core::concat("chunk_bytes is ", options_.chunk_bytes, ", expected at least 1"));
  }
}

void GradientAverager::broadcast(const torch::nn::Module& module) {
  broadcast_module(group_, module, {.timeout = options_.timeout});
}

void GradientAverager::broadcast_buffers(const torch::nn::Module& module) {
  parallel::broadcast_buffers(group_, module, {.timeout = options_.timeout});
}

AverageReport GradientAverager::average(std::span<const at::Tensor> parameters, double weight, bool finite) {
  if (!std::isfinite(weight) || weight < 0) {
    throw UsageError("parallel.average", core::concat("weight is ", weight, ", expected 0 or more"));
  }
  const auto size = static_cast<std::size_t>(group_.size());
  const auto rank = static_cast<std::size_t>(group_.rank());
  // [weights of the ranks | 1 where the loss was not finite | ranks that have this gradient]
  at::Tensor header = at::zeros({static_cast<std::int64_t>(2 * size + parameters.size())}, at::kDouble);
  double* const words = header.data_ptr<double>();
  words[rank] = weight;
  words[size + rank] = finite ? 0 : 1;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) {
      throw UsageError(
          "parallel.average",
          core::concat("gradient ", i, " ", gradient.sizes(), " is sparse, expected a dense one"),
          "EmbeddingOptions().sparse(false)");
    }
    words[2 * size + i] = 1;
  }
  group_.all_reduce(header, comm::ReduceOp::SUM, {options_.timeout}).wait();

  AverageReport report;
  for (std::size_t r = 0; r < size; ++r) report.weight += words[r];
  for (std::size_t r = 0; r < size && !report.bad_rank; ++r) {
    if (words[size + r] != 0) report.bad_rank = static_cast<int>(r);
  }
  if (!report.ok() || report.weight == 0) return report;

  std::vector<Chunk> chunks;
  std::map<std::string, std::size_t> open;  // the chunk that still has room, by type and device
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (words[2 * size + i] == 0) continue;
    const at::Tensor& parameter = parameters[i];
    const std::string kind = core::concat(parameter.dtype().name(), " ", parameter.device().str());
    const auto found = open.find(kind);
    const auto bytes = static_cast<std::int64_t>(parameter.nbytes());
    const bool fits = found != open.end() &&
                      chunks[found->second].numel * parameter.element_size() + bytes <= options_.chunk_bytes;
    if (!fits) {
      open[kind] = chunks.size();
      chunks.push_back({.key = core::concat(kind, " ", chunks.size()), .parameters = {}, .flat = {}});
    }
    Chunk& chunk = chunks[open[kind]];
    chunk.parameters.push_back(parameter);
    chunk.numel += parameter.numel();
    report.bytes += bytes;
  }
  reduce_chunks(chunks, weight / report.weight);
  return report;
}

void GradientAverager::reduce_chunks(std::vector<Chunk>& chunks, double scale) {
  const at::NoGradGuard no_grad;
  const auto each_slice = [](Chunk& chunk, const auto& fn) {
    std::int64_t begin = 0;
    for (at::Tensor& parameter : chunk.parameters) {
      at::Tensor slice = chunk.flat.narrow(0, begin, parameter.numel()).view(parameter.sizes());
      fn(parameter, slice);
      begin += parameter.numel();
    }
  };
  std::vector<comm::Pending> pending;
  for (Chunk& chunk : chunks) {
    at::Tensor& buffer = buffers_[chunk.key];
    if (!buffer.defined() || buffer.numel() < chunk.numel) {
      buffer = group_.empty({chunk.numel}, chunk.parameters.front().options().requires_grad(false));
    }
    chunk.flat = buffer.narrow(0, 0, chunk.numel);
    each_slice(chunk, [&](const at::Tensor& parameter, at::Tensor& slice) {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined() && scale > 0) {
        at::mul_out(slice, gradient, at::scalar_tensor(scale, gradient.options()));
      } else {
        slice.zero_();
      }
    });
    pending.push_back(group_.all_reduce(chunk.flat, comm::ReduceOp::SUM, {options_.timeout}));
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    pending[i].wait();
    each_slice(chunks[i], [](at::Tensor& parameter, const at::Tensor& slice) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
      parameter.mutable_grad().copy_(slice);
    });
  }
}

}  // namespace cohort::parallel
