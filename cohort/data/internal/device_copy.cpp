#include "cohort/data/internal/device_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace cohort::data {
namespace {

at::Device with_index(at::Device device) {
  return device.has_index() ? device : at::Device(device.type(), at::accelerator::getDeviceIndex());
}

}  // namespace

DeviceCopy::DeviceCopy(at::Device device)
    : device_(with_index(device)),
      stream_(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_)) {}

DeviceCopy::Copy DeviceCopy::begin(const std::vector<at::Tensor>& fields, BatchBuffer& buffer) {
  // A stream of its own: on the caller's the copy would wait for the step that is being computed.
  const c10::StreamGuard guard(stream_);
  Copy copy{{}, c10::Event(device_.type())};
  for (const at::Tensor& field : fields) {
    copy.fields.push_back(field.to(device_, field.scalar_type(), /*non_blocking=*/true));
  }
  copy.ready.record(stream_);
  // A second event: the first goes away with the batch, this one guards the host's memory until it is used
  // again.
  buffer.copied.emplace(device_.type());
  buffer.copied->record(stream_);
  return copy;
}

std::vector<at::Tensor> DeviceCopy::finish(Copy copy) {
  const c10::Stream current = at::accelerator::getCurrentStream(device_.index());
  copy.ready.block(current);
  // The memory belongs to the copy stream's pool: it must not be handed out there before `current` is done.
  for (const at::Tensor& field : copy.fields) field.record_stream(current);
  return std::move(copy.fields);
}

}  // namespace cohort::data
