#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>

/// A value that goes from node to node of a graph as if it were a gradient.
namespace cohort::core {
namespace carried_detail {

template <typename T>
void destroy(void* value) {
  delete static_cast<T*>(value);
}

}  // namespace carried_detail

/// Returns a tensor, [0] of float32, that owns `value`, which may be null. On a GPU, autograd orders the
/// nodes that it goes through by their streams, as it does for gradients.
template <typename T>
at::Tensor carry(std::unique_ptr<T> value, c10::Device device = c10::kCPU) {
  T* const held = value.release();
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::DataPtr(held, held, &carried_detail::destroy<T>, device));
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                  caffe2::TypeMeta::Make<float>());
}

/// Returns what carry() gave the tensor; it must have been a T.
template <typename T>
T& carried(const at::Tensor& tensor) {
  return *static_cast<T*>(tensor.storage().data_ptr().get_context());
}

}  // namespace cohort::core
