#include "cohort/parallel/broadcast.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "cohort/comm/text.h"
#include "cohort/core/error.h"
#include "cohort/parallel/flat.h"

namespace cohort::parallel {
namespace {

bool is_ignored(const BroadcastOptions& options, const std::string& name) {
  return std::ranges::find(options.ignored, name) != options.ignored.end();
}

// What ranks must have in common, a line for each tensor.
std::string layout_of(const torch::nn::Module& module, const BroadcastOptions& options) {
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
void append(std::vector<at::Tensor>& tensors, const Entries& entries, const BroadcastOptions& options) {
  for (const auto& entry : entries) {
    if (!is_ignored(options, entry.key())) tensors.push_back(entry.value());
  }
}

// Small tensors of one type and device travel as one.
void send_from_root(const comm::Group& group, const std::vector<at::Tensor>& tensors,
                    const BroadcastOptions& options) {
  constexpr std::size_t kSmall = 64 << 10;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> wholes;
  std::map<std::string, std::vector<at::Tensor>> small;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    (tensor.nbytes() > kSmall ? wholes : small[kind_of(tensor)]).push_back(tensor.detach());
  }
  const bool is_root = group.rank() == options.root;
  std::vector<comm::Pending> pending;
  const auto send = [&](at::Tensor tensor) {
    pending.push_back(group.broadcast(tensor, options.root, {options.timeout}));
  };
  for (const at::Tensor& tensor : wholes) send(tensor);
  std::vector<std::pair<at::Tensor, at::Tensor>> joined;  // a tensor, and where it lies among others
  for (const auto& [kind, list] : small) {
    const at::Tensor flat = group.empty({total_numel(list)}, list.front().options());
    const std::vector<at::Tensor> pieces = pieces_of(flat, list);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (is_root) pieces[i].copy_(list[i]);
      joined.emplace_back(list[i], pieces[i]);
    }
    send(flat);
  }
  for (comm::Pending& each : pending) each.wait();
  if (is_root) return;
  for (const auto& [tensor, piece] : joined) tensor.copy_(piece);
}

}  // namespace

void broadcast_module(const comm::Group& group, const torch::nn::Module& module,
                      const BroadcastOptions& options) {
  comm::require_same(group, "the model", layout_of(module, options));
  std::vector<at::Tensor> tensors;
  append(tensors, module.named_parameters(), options);
  append(tensors, module.named_buffers(), options);
  send_from_root(group, tensors, options);
}

void broadcast_buffers(const comm::Group& group, const torch::nn::Module& module,
                       const BroadcastOptions& options) {
  std::vector<at::Tensor> tensors;
  append(tensors, module.named_buffers(), options);
  send_from_root(group, tensors, options);
}

}  // namespace cohort::parallel
