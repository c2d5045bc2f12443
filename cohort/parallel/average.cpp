// An all-reduce of a header comes first: the weights, whether numbers are finite, and which gradients each
// rank has. From its sum every rank cuts the same chunks, in the order of the parameters, so the all-reduces
// that follow match. A gradient that a rank lacks travels as zeros. Gradients are scaled before the sum, by
// this rank's share of the weight. All chunks are begun before the first is waited for.
#include "cohort/parallel/average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include "cohort/base/error.h"
#include "cohort/parallel/broadcast.h"
#include "cohort/parallel/internal/coalesce.h"

namespace cohort::parallel {

// Gradients that travel as one.
struct GradientAverager::Chunk {
  std::string key;
  std::vector<at::Tensor> parameters = {};
  std::int64_t numel = 0;
  std::vector<at::Tensor> pieces = {};  // where each lies
};

GradientAverager::GradientAverager(comm::Group group, AverageOptions options)
    : group_(std::move(group)), options_(options) {
  if (!group_) throw UsageError("parallel.average", "this process is not in the group");
  if (options_.chunk_bytes < 1) {
    throw UsageError("parallel.average",
                     base::concat("chunk_bytes is ", options_.chunk_bytes, ", expected at least 1"));
  }
}

void GradientAverager::broadcast(const torch::nn::Module& module) {
  broadcast_module(group_, module, {.timeout = options_.timeout});
}

void GradientAverager::broadcast_buffers(const torch::nn::Module& module) {
  parallel::broadcast_buffers(group_, module, {.timeout = options_.timeout});
}

AverageReport GradientAverager::average(std::span<const at::Tensor> parameters, double weight, bool finite) {
  // After the step info: 1 for each gradient that this rank has.
  const auto count = static_cast<std::int64_t>(parameters.size());
  at::Tensor header = make_step_header(group_, {.weight = weight, .finite = finite}, count);
  double* const has = header.mutable_data_ptr<double>() + (header.numel() - count);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) {
      throw UsageError(
          "parallel.average",
          base::concat("gradient ", i, " ", gradient.sizes(), " is sparse, expected a dense one"),
          "EmbeddingOptions().sparse(false)");
    }
    has[i] = 1;
  }
  group_.all_reduce(header, comm::ReduceOp::SUM, {options_.timeout}).wait();

  AverageReport report = read_step_header(header, group_.size());
  // All ranks have read the same sums, so all return here or none does.
  if (!report.ok() || report.weight == 0) return report;

  std::vector<Chunk> chunks;
  std::map<std::string, std::size_t> open;  // the chunk that still has room, by type and device
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (has[i] == 0) continue;
    const at::Tensor& parameter = parameters[i];
    const std::string kind = kind_of(parameter);
    const auto found = open.find(kind);
    const auto bytes = static_cast<std::int64_t>(parameter.nbytes());
    const bool fits = found != open.end() &&
                      chunks[found->second].numel * parameter.element_size() + bytes <= options_.chunk_bytes;
    if (!fits) {
      open[kind] = chunks.size();
      chunks.push_back({.key = base::concat(kind, " ", chunks.size())});
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
  std::vector<comm::Pending> pending;
  for (Chunk& chunk : chunks) {
    // Kept between steps: chunks are cut alike as long as the same gradients come.
    at::Tensor& buffer = buffers_[chunk.key];
    if (!buffer.defined() || buffer.numel() < chunk.numel) {
      buffer = group_.empty({chunk.numel}, chunk.parameters.front().options().requires_grad(false));
    }
    at::Tensor flat = buffer.narrow(0, 0, chunk.numel);
    chunk.pieces = views_of(flat, chunk.parameters);
    for (std::size_t i = 0; i < chunk.pieces.size(); ++i) {
      const at::Tensor& gradient = chunk.parameters[i].grad();
      // Not multiplied by a scale of 0: 0 * NaN of this rank would reach all ranks.
      if (gradient.defined() && scale > 0) {
        scale_into(chunk.pieces[i], gradient, scale);
      } else {
        chunk.pieces[i].zero_();
      }
    }
    pending.push_back(group_.all_reduce(flat, comm::ReduceOp::SUM, {options_.timeout}));
  }
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    pending[c].wait();
    for (std::size_t i = 0; i < chunks[c].pieces.size(); ++i) {
      at::Tensor& gradient = chunks[c].parameters[i].mutable_grad();
      if (!gradient.defined() || gradient._is_zerotensor()) {  // which cannot be written to
        gradient = at::zeros_like(chunks[c].parameters[i]);
      }
      gradient.copy_(chunks[c].pieces[i]);
    }
  }
}

}  // namespace cohort::parallel
