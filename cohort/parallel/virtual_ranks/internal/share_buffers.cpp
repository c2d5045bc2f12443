// All buffers are copied into one tensor of bytes for each device, so that restore() is one call and
// send_result() one transfer. Always: a virtual rank begins with the bytes that the step began with.
#include "cohort/parallel/virtual_ranks/internal/share_buffers.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <string>

namespace cohort::parallel {
namespace {

// Any type may begin here.
constexpr std::int64_t kAlignment = 64;

std::int64_t aligned_bytes(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool can_be_written(const at::Tensor& buffer) {
  if (!buffer.defined() || buffer.numel() == 0) return false;
  return buffer.layout() == at::kStrided && at::has_internal_overlap(buffer) != at::MemOverlap::Yes;
}

void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  const at::NoGradGuard no_grad;
  if (!to.empty()) at::_foreach_copy_(to, from);
}

}  // namespace

ShareBuffers::ShareBuffers(const std::vector<NamedModule>& modules) {
  for (const NamedModule& entry : modules) {
    for (const at::Tensor& buffer : entry.module->buffers()) {
      if (can_be_written(buffer)) buffers_.push_back(buffer.detach());
    }
  }
  begin_ = make_copies();
  result_ = make_copies();
}

std::int64_t ShareBuffers::bytes_of(const std::vector<NamedModule>& modules) {
  std::int64_t bytes = 0;
  for (const NamedModule& entry : modules) {
    for (const at::Tensor& buffer : entry.module->buffers()) {
      if (can_be_written(buffer)) bytes += 2 * aligned_bytes(buffer);
    }
  }
  return bytes;
}

ShareBuffers::Copies ShareBuffers::make_copies() const {
  std::map<std::string, std::int64_t> bytes;
  for (const at::Tensor& buffer : buffers_) bytes[buffer.device().str()] += aligned_bytes(buffer);
  Copies copies;
  std::map<std::string, at::Tensor> flats;
  for (const auto& [device, size] : bytes) {
    flats[device] = at::zeros({size}, at::TensorOptions().dtype(at::kByte).device(device));
    copies.bytes.push_back(flats[device]);
    bytes[device] = 0;
  }
  for (const at::Tensor& buffer : buffers_) {
    std::int64_t& begin = bytes[buffer.device().str()];
    const at::Tensor piece =
        flats[buffer.device().str()].narrow(0, begin, static_cast<std::int64_t>(buffer.nbytes()));
    copies.tensors.push_back(piece.view(buffer.scalar_type()).view(buffer.sizes()));
    begin += aligned_bytes(buffer);
  }
  return copies;
}

void ShareBuffers::begin() {
  copy_all(begin_.tensors, buffers_);
}

void ShareBuffers::restore() {
  copy_all(buffers_, begin_.tensors);
}

void ShareBuffers::keep_result() {
  copy_all(result_.tensors, buffers_);
}

void ShareBuffers::send_result(SliceExchange* exchange) {
  transfers_.clear();
  if (exchange == nullptr) return;
  for (const at::Tensor& bytes : result_.bytes) transfers_.push_back(exchange->broadcast(bytes));
}

void ShareBuffers::release_result() {
  transfers_.clear();
  result_ = make_copies();
}

void ShareBuffers::receive_result() {
  for (const SliceExchange::Transfer& arrived : transfers_) arrived();
  transfers_.clear();
}

void ShareBuffers::set_result() {
  copy_all(buffers_, result_.tensors);
}

}  // namespace cohort::parallel
