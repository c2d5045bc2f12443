// Large tensors travel alone; small tensors of a type and device are copied into a flat tensor and travel
// together. Ranks compare the layout of a module, as text, before its first byte travels. BufferBroadcast
// copies the root's buffers in stage(), so that the backward in between may change them. A CPU tensor that
// has the bits of the flat tensor already is not written to, so a graph that has saved it stays valid.
#include "cohort/parallel/broadcast.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/parallel/internal/coalesce.h"

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
      text += base::concat(kind, " ", entry.key(), " ", entry.value().dtype().name(), entry.value().sizes(),
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

bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_contiguous() || !b.is_contiguous() || a.is_conj() || a.is_neg()) return false;
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Copies `tensors` to the pieces of `flat`, one after the other; or back.
void copy_to_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const std::vector<at::Tensor> pieces = views_of(flat, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) pieces[i].copy_(tensors[i]);
}
// What has these values already is not written to, so that a graph that has saved it can be gone back through
// again. On a GPU it is: to compare would wait for the device.
void copy_from_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const std::vector<at::Tensor> pieces = views_of(flat, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!flat.is_cpu() || !has_same_bits(tensors[i], pieces[i])) tensors[i].copy_(pieces[i]);
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
  std::map<std::string, at::Tensor> flats;
  for (const auto& [kind, list] : small) {
    at::Tensor& flat = flats[kind] = group.empty({total_numel(list)}, list.front().options());
    if (is_root) copy_to_flat(flat, list);
    send(flat);
  }
  for (comm::Pending& each : pending) each.wait();
  if (is_root) return;
  for (const auto& [kind, list] : small) copy_from_flat(flats[kind], list);
}

}  // namespace

void broadcast_module(const comm::Group& group, const torch::nn::Module& module,
                      const BroadcastOptions& options) {
  comm::require_same(group, "the model", layout_of(module, options), {options.timeout});
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

BufferBroadcast::BufferBroadcast(comm::Group group, const torch::nn::Module& module, BroadcastOptions options)
    : group_(std::move(group)), module_(module), options_(std::move(options)) {}

void BufferBroadcast::stage() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> buffers;
  append(buffers, module_.named_buffers(), options_);
  std::map<std::string, std::vector<at::Tensor>> by_kind;
  for (const at::Tensor& buffer : buffers) {
    if (buffer.numel() > 0) by_kind[kind_of(buffer)].push_back(buffer.detach());
  }
  flats_.clear();
  for (auto& [kind, list] : by_kind) {
    at::Tensor& values = values_[kind];
    if (!values.defined() || values.numel() != total_numel(list)) {
      values = group_.empty({total_numel(list)}, list.front().options());
    }
    if (group_.rank() == options_.root) copy_to_flat(values, list);
    flats_.push_back({.buffers = std::move(list), .values = values, .pending = {}});
  }
}

void BufferBroadcast::begin() {
  for (Flat& flat : flats_) {
    flat.pending = group_.broadcast(flat.values, options_.root, {options_.timeout});
  }
}

void BufferBroadcast::end() {
  const at::NoGradGuard no_grad;
  for (Flat& flat : flats_) {
    flat.pending.wait();
    if (group_.rank() != options_.root) copy_from_flat(flat.values, flat.buffers);
  }
  flats_.clear();
}

}  // namespace cohort::parallel
