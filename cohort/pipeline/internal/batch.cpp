// Micro-batches are detached views along dimension 0: no sample is copied, and they share no history. A stage
// may write to its view, so each has a scoped version counter; publish_versions() makes the changes known
// afterwards. A gradient that came for some micro-batches only is joined with zeros; where none came the
// result is undefined. Gradients of inputs go into the caller's graph by a backward that begins at the
// inputs.
#include "cohort/pipeline/internal/batch.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <numeric>

#include "cohort/base/error.h"

namespace cohort::pipeline {
namespace {

using base::concat;
constexpr const char* kWhereBatch = "pipeline.step";

}  // namespace

std::vector<std::int64_t> split_sizes(std::int64_t num_samples, const PipelineOptions& options) {
  if (num_samples < 1)
    throw UsageError(kWhereBatch, concat("got a batch of ", num_samples, " samples, expected at least 1"));
  std::vector<std::int64_t> sizes;
  if (options.split_size > 0) {
    for (std::int64_t done = 0; done < num_samples; done += options.split_size) {
      sizes.push_back(std::min(options.split_size, num_samples - done));
    }
    return sizes;
  }
  const std::int64_t count = std::min<std::int64_t>(options.num_micro_batches, num_samples);
  // The first ones get a sample more, so sizes differ by one at most.
  for (std::int64_t m = 0; m < count; ++m)
    sizes.push_back(num_samples / count + (m < num_samples % count ? 1 : 0));
  return sizes;
}

std::vector<std::int64_t> split_sizes(const Tensors& inputs, const Tensors& targets,
                                      const PipelineOptions& options) {
  std::int64_t samples = -1;
  const auto check = [&](const Tensors& tensors, const char* what) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      if (!tensor.defined()) continue;
      if (tensor.dim() == 0) {
        throw UsageError(
            kWhereBatch,
            concat(what, " ", i, " has no dimension, expected [N, ...]: it is cut along the first"));
      }
      if (samples < 0) samples = tensor.size(0);
      if (tensor.size(0) != samples) {
        throw UsageError(kWhereBatch, concat(what, " ", i, " has ", tensor.size(0), " samples, expected ",
                                             samples, " as input 0"));
      }
    }
  };
  check(inputs, "input");
  check(targets, "target");
  if (samples < 0) throw UsageError(kWhereBatch, "got no input, expected at least one tensor");
  return split_sizes(samples, options);
}

std::int64_t num_samples(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

std::vector<Tensors> split(const Tensors& tensors, const std::vector<std::int64_t>& sizes,
                           std::vector<autograd::ScopedVersionCounter>* counts) {
  std::vector<Tensors> parts(sizes.size());
  std::int64_t first = 0;
  for (std::size_t m = 0; m < sizes.size(); ++m) {
    for (const at::Tensor& tensor : tensors) {
      parts[m].push_back(tensor.defined() ? tensor.detach().narrow(0, first, sizes[m]) : tensor);
      if (counts != nullptr && tensor.defined() && !tensor.is_inference()) {
        counts->emplace_back(parts[m].back(), tensor);
      }
    }
    first += sizes[m];
  }
  return parts;
}

Tensors join(const std::vector<Tensors>& parts) {
  Tensors joined;
  for (std::size_t i = 0; i < parts.front().size(); ++i) {
    std::vector<at::Tensor> list;
    for (const Tensors& part : parts) {
      const at::Tensor& tensor = part.at(i);
      if (!tensor.defined()) continue;
      if (tensor.dim() == 0) {
        throw UsageError("pipeline.forward",
                         concat("output ", i, " of the last stage has no dimension, expected [n, ...]"),
                         "step(), which takes the loss");
      }
      list.push_back(tensor.detach());
    }
    joined.push_back(list.empty() ? at::Tensor() : list.size() == 1 ? list.front() : at::cat(list));
  }
  return joined;
}

Tensors join_gradients(const std::vector<Tensors>& parts, const Tensors& inputs,
                       const std::vector<std::int64_t>& sizes) {
  Tensors joined;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) {
      joined.emplace_back();
      continue;
    }
    std::vector<at::Tensor> list;
    bool any = false;
    for (std::size_t m = 0; m < parts.size(); ++m) {
      const at::Tensor gradient = i < parts[m].size() ? parts[m][i] : at::Tensor();
      any = any || gradient.defined();
      if (gradient.defined()) {
        // Stage 0 may compute on another device than the caller's input is on.
        list.push_back(gradient.to(inputs[i].device()));
      } else {
        auto shape = inputs[i].sizes().vec();
        shape[0] = sizes[m];
        list.push_back(at::zeros(shape, inputs[i].options()));
      }
    }
    joined.push_back(any ? at::cat(list) : at::Tensor());
  }
  return joined;
}

void hand_back(const Tensors& inputs, const Tensors& gradients) {
  Tensors roots, of_roots;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(inputs[i]);
    of_roots.push_back(gradients[i]);
  }
  // One backward for all inputs, as they may share a graph that is freed by it.
  if (!roots.empty()) torch::autograd::backward(roots, of_roots);
}

std::shared_ptr<Batch> make_batch(const Setup& setup, const Tensors& inputs,
                                  const std::vector<std::int64_t>& sizes) {
  auto batch = std::make_shared<Batch>(setup, static_cast<int>(sizes.size()));
  batch->inputs = split(inputs, sizes, &batch->counts);
  for (const at::Tensor& input : inputs)
    batch->requires_grad.push_back(input.defined() && input.requires_grad());
  return batch;
}

void publish_versions(Batch& batch) {
  // All publish before one syncs: two inputs may share a counter.
  for (autograd::ScopedVersionCounter& count : batch.counts) count.publish();
  for (autograd::ScopedVersionCounter& count : batch.counts) count.sync();
}

}  // namespace cohort::pipeline
