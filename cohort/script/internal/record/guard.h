#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/script/internal/ir/tape.h"

namespace torch::nn {
class Module;
}

/// What must be as it was when a program was recorded: docs/guide/script.md, "Guards".
namespace cohort::script {

/// Settings of the calling thread and of LibTorch that decide which operators run.
struct Environment {
  bool grad = false;           ///< gradient mode
  bool inference = false;      ///< inference mode
  bool deterministic = false;  ///< deterministic algorithms only
  c10::ScalarType default_dtype = c10::ScalarType::Float;
  std::array<bool, 2> autocast{};                   ///< on the CPU, on CUDA
  std::array<c10::ScalarType, 2> autocast_dtype{};  ///< on the CPU, on CUDA
  std::uint32_t switches = 0;  ///< of at::Context, a bit each: which libraries and kernels may be used

  /// Reads the calling thread's.
  static Environment now();
  bool operator==(const Environment&) const = default;
  /// For people: "with gradients, autocast to BFloat16".
  std::string str() const;
};

/// Type, device, sizes, strides and requires_grad of each input, and which of them share memory.
class InputGuard {
 public:
  explicit InputGuard(std::span<const at::Tensor> inputs);
  /// Costs some nanoseconds an input, and allocates nothing.
  bool holds(std::span<const at::Tensor> inputs) const;
  /// True if each input begins where it began in its storage, and that is no smaller than it was.
  bool storages_hold(std::span<const at::Tensor> inputs) const;
  /// For people: each input's type and sizes.
  std::string str() const;

 private:
  struct Input {
    bool defined = false;
    bool requires_grad = false;
    bool is_plain = false;        // strided: else only keys and type are compared, and its calls are eager
    std::size_t shares_with = 0;  // the first input of the same storage
    c10::DispatchKeySet keys;     // tell inference tensors too
    caffe2::TypeMeta dtype;
    Layout layout;
    std::size_t storage_bytes = 0;
    std::size_t dims = 0;
    std::size_t numbers = 0;  // where numbers_ has the sizes, and then the strides
  };
  // True if this input shares memory with whom it did, as far apart.
  bool sharing_holds(std::span<const at::Tensor> inputs, std::size_t index) const;

  std::vector<Input> inputs_;
  std::vector<std::int64_t> numbers_;  // side by side: they are compared before every replay
};

namespace guard_detail {
bool autograd_knows_tangent(const at::Tensor& tensor);
}

/// True if a tensor carries a tangent of forward-mode AD, which no program computes with. Asked of every
/// captured tensor before each replay: autograd knows nothing of most that need no gradient.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr &&
         guard_detail::autograd_knows_tangent(tensor);
}

/// Training flags and parameters of modules, and which modules they consist of.
/// Ownership: shares the modules.
class ModuleGuard {
 public:
  ModuleGuard() = default;
  explicit ModuleGuard(std::vector<std::shared_ptr<torch::nn::Module>> modules);
  /// True if no module, and none below, changed its training flag, its direct submodules, or of a parameter
  /// the handle, the memory or requires_grad.
  bool holds() const;
  /// Whether there is any module to look at.
  bool watches_any() const { return !watched_.empty(); }
  /// True if a parameter lies in this memory: holds() would see that it gets other memory.
  bool owns(const c10::StorageImpl* storage) const;
  /// True if a parameter or a buffer lies in this memory.
  bool has(const c10::StorageImpl* storage) const;

 private:
  struct Held {
    const c10::TensorImpl* tensor;
    const c10::StorageImpl* storage;
    bool requires_grad;
    static Held of(const at::Tensor& tensor);
    bool operator==(const Held&) const = default;
  };
  struct Watched {
    std::shared_ptr<torch::nn::Module> module;
    bool training;
    std::vector<Held> parameters;
    std::vector<const torch::nn::Module*> children;
  };
  std::vector<Watched> watched_;
};

}  // namespace cohort::script
