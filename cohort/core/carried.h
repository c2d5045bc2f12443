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

/// Returns a tensor on the CPU, [0] of float32, that owns `value`, which may be null.
template <typename T>
at::Tensor carry(std::unique_ptr<T> value) {
  T* const held = value.release();
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::DataPtr(held, held, &carried_detail::destroy<T>, c10::kCPU));
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>());
}

/// Returns what carry() gave the tensor; it must have been a T.
template <typename T>
T& carried(const at::Tensor& tensor) {
  return *static_cast<T*>(tensor.storage().data_ptr().get_context());
}

}  // namespace cohort::core
