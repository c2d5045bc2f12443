#include "cohort/parallel/replicate.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "cohort/comm/text.h"
#include "cohort/core/error.h"

namespace cohort::parallel {
namespace {

bool is_ignored(const ReplicateOptions& options, const std::string& name) {
  return std::ranges::find(options.ignored, name) != options.ignored.end();
}

// What ranks must have in common, a line for each tensor.
std::string layout_of(const torch::nn::Module& module, const ReplicateOptions& options) {
  std::string text;
  const auto add = [&](const char* kind, const auto& entries) {
    for (const auto& entry : entries) {
      if (is_ignored(options, entry.key())) continue;
      text += core::concat(kind, " ", entry.key(), " ", entry.value().dtype().name(), entry.value().sizes(),
                           "\n");
    }
  };
  add("parameter", module.named_parameters());
  add("buffer", module.named_buffers());
  return text;
}

// Appends those that are not ignored.
template <typename Entries>
void append(std::vector<at::Tensor>& tensors, const Entries& entries, const ReplicateOptions& options) {
  for (const auto& entry : entries) {
    if (!is_ignored(options, entry.key())) tensors.push_back(entry.value());
  }
}

// Small tensors of one type and device travel as one.
void send_from_root(const comm::Group& group, const std::vector<at::Tensor>& tensors,
                    const ReplicateOptions& options) {
  constexpr std::size_t kSmall = 64 << 10;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> wholes;
  std::map<std::string, std::vector<at::Tensor>> small;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (tensor.nbytes() > kSmall) {
      wholes.push_back(tensor.detach());
    } else {
      small[core::concat(tensor.dtype().name(), " ", tensor.device().str())].push_back(tensor.detach());
    }
  }
  std::vector<std::pair<at::Tensor, std::vector<at::Tensor>>> joined;
  for (auto& [kind, list] : small) {
    std::int64_t numel = 0;
    for (const at::Tensor& tensor : list) numel += tensor.numel();
    at::Tensor flat = group.empty({numel}, list.front().options());
    joined.emplace_back(flat, std::move(list));
  }
  const auto each_piece = [](auto& entry, const auto& body) {
    std::int64_t at = 0;
    for (at::Tensor& tensor : entry.second) {
      at::Tensor piece = entry.first.narrow(0, at, tensor.numel()).view(tensor.sizes());
      body(tensor, piece);
      at += tensor.numel();
    }
  };
  std::vector<comm::Pending> pending;
  for (at::Tensor& tensor : wholes)
    pending.push_back(group.broadcast(tensor, options.root, {options.timeout}));
  for (auto& entry : joined) {
    if (group.rank() == options.root) {
      each_piece(entry, [](const at::Tensor& tensor, at::Tensor& piece) { piece.copy_(tensor); });
    }
    pending.push_back(group.broadcast(entry.first, options.root, {options.timeout}));
  }
  for (comm::Pending& each : pending) each.wait();
  if (group.rank() == options.root) return;
  for (auto& entry : joined) {
    each_piece(entry, [](at::Tensor& tensor, const at::Tensor& piece) { tensor.copy_(piece); });
  }
}

}  // namespace

void broadcast_module(const comm::Group& group, const torch::nn::Module& module,
                      const ReplicateOptions& options) {
  comm::require_same(group, "the model", layout_of(module, options));
  std::vector<at::Tensor> tensors;
  append(tensors, module.named_parameters(), options);
  append(tensors, module.named_buffers(), options);
  send_from_root(group, tensors, options);
}

void broadcast_buffers(const comm::Group& group, const torch::nn::Module& module,
                       const ReplicateOptions& options) {
  std::vector<at::Tensor> tensors;
  append(tensors, module.named_buffers(), options);
  send_from_root(group, tensors, options);
}

}  // namespace cohort::parallel
