#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>

/// A value that goes from node to node of a graph as if it were a gradient.
namespace cohort::autograd {
namespace tensor_box_detail {

template <typename T>
void destroy(void* value) {
  delete static_cast<T*>(value);
}

}  // namespace tensor_box_detail

/// Returns a tensor, [0] of float32, that owns `value`, which may be null. On a GPU, autograd orders the
/// nodes that it goes through by their streams, as it does for gradients.
template <typename T>
at::Tensor box_in_tensor(std::unique_ptr<T> value, c10::Device device = c10::kCPU) {
  T* const held = value.release();
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::DataPtr(held, held, &tensor_box_detail::destroy<T>, device));
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                  caffe2::TypeMeta::Make<float>());
}

/// Returns what box_in_tensor() gave the tensor; it must have been a T.
template <typename T>
T& unbox(const at::Tensor& tensor) {
  return *static_cast<T*>(tensor.storage().data_ptr().get_context());
}

}  // namespace cohort::autograd
