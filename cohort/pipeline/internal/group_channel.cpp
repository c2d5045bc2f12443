// The header has a fixed length, so that it can be received before anything is known of what comes. Sizes and
// strides travel in it: a tensor keeps its memory format, and its elements go as a flat run of bytes. A
// message under way keeps its tensors until its sends are over, and beyond the capacity the oldest is waited
// for.
#include "cohort/pipeline/internal/group_channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cohort/base/error.h"

namespace cohort::pipeline {
namespace {

using base::concat;

// Numbers of a header: micro-batch and count, and for each tensor flags, type, dimensions, sizes and strides.
constexpr std::int64_t kHeader = 512;
constexpr std::int64_t kDefined = 1, kRequiresGrad = 2;

at::Tensor encode_header(const Message& message) {
  at::Tensor header = at::zeros({kHeader}, at::kLong);
  auto* const numbers = header.mutable_data_ptr<std::int64_t>();
  std::int64_t place = 0;
  const auto put = [&](std::int64_t number) {
    if (place == kHeader) {
      throw UsageError("pipeline.send",
                       concat(message.tensors.size(),
                              " tensors between two stages do not fit into "
                              "one message"),
                       "fewer tensors");
    }
    numbers[place++] = number;
  };
  put(message.micro_batch);
  put(static_cast<std::int64_t>(message.tensors.size()));
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    put((tensor.defined() ? kDefined : 0) | (message.requires_grad[i] ? kRequiresGrad : 0));
    if (!tensor.defined()) continue;
    put(static_cast<std::int64_t>(tensor.scalar_type()));
    put(tensor.dim());
    for (const std::int64_t size : tensor.sizes()) put(size);
    for (const std::int64_t stride : tensor.strides()) put(stride);
  }
  return header;
}

Message empty_message(const at::Tensor& header, c10::Device device) {
  const auto* numbers = header.const_data_ptr<std::int64_t>();
  Message message{static_cast<int>(*numbers++), {}, {}};
  const std::int64_t count = *numbers++;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t flags = *numbers++;
    message.requires_grad.push_back((flags & kRequiresGrad) != 0);
    message.tensors.emplace_back();
    if ((flags & kDefined) == 0) continue;
    const auto type = static_cast<at::ScalarType>(*numbers++);
    const std::int64_t dims = *numbers++;
    const at::IntArrayRef sizes(numbers, static_cast<std::size_t>(dims));
    const at::IntArrayRef strides(numbers + dims, static_cast<std::size_t>(dims));
    message.tensors.back() = at::empty_strided(sizes, strides, at::TensorOptions(type).device(device));
    numbers += 2 * dims;
  }
  return message;
}

// What goes as bytes: without gaps. A memory format stays, as kernels choose by it. Lazy conjugates and
// negatives are resolved by LibTorch's dispatcher, on their way to the backend.
at::Tensor dense(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

// Its elements as they lie.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}

}  // namespace

comm::CallOptions until(const base::Deadline& deadline) {
  return {std::chrono::milliseconds(std::max(1, deadline.remaining_ms()))};
}

void GroupChannel::wait_for_oldest() {
  for (comm::Pending& pending : in_flight_.front().pending) pending.wait();
  in_flight_.pop_front();
}

void GroupChannel::send(Message message, const base::Deadline& deadline) {
  while (in_flight_.size() >= static_cast<std::size_t>(capacity_)) wait_for_oldest();
  InFlight next;
  for (at::Tensor& tensor : message.tensors) tensor = dense(tensor);
  next.tensors.push_back(encode_header(message));
  for (const at::Tensor& tensor : message.tensors) {
    if (tensor.defined() && tensor.numel() > 0) next.tensors.push_back(flat(tensor));
  }
  for (const at::Tensor& tensor : next.tensors)
    next.pending.push_back(group_.send(tensor, peer_, tag_, until(deadline)));
  in_flight_.push_back(std::move(next));
}

Message GroupChannel::receive(const base::Deadline& deadline) {
  at::Tensor header = at::empty({kHeader}, at::kLong);
  group_.recv(header, peer_, tag_, until(deadline)).wait();
  Message message = empty_message(header, device_);
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    at::Tensor elements = flat(tensor);
    group_.recv(elements, peer_, tag_, until(deadline)).wait();
  }
  return message;
}

void GroupChannel::flush() {
  while (!in_flight_.empty()) wait_for_oldest();
}

}  // namespace cohort::pipeline
