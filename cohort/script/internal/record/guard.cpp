// Guards are compared before every replay. Inputs are compared in one loop, without allocation or lock: key
// set, type, and sizes and strides, which lie side by side in one array. Shared memory is found by a small
// Bloom filter of storage addresses, and pairs are compared only if it says so. Modules are compared by
// handle, memory and requires_grad of each parameter, and by their children. Always: a guard may reject a
// call that its program could take, but accepts none where something that it watches differs. Surprising:
// values of C++ are no guard. Verification finds those.
#include "cohort/script/internal/record/guard.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::script {
namespace {

using base::concat;

// Module keeps its parameters for derived classes; named_parameters() copies names and costs microseconds.
struct Peek : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& parameters_of(const torch::nn::Module& module) {
    return module.*&Peek::parameters_;
  }
};

// Null where there is none.
const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The first input of the same storage, which may be the one at `index` itself.
std::size_t first_that_shares(std::span<const at::Tensor> inputs, std::size_t index) {
  const c10::StorageImpl* const storage = storage_of(inputs[index]);
  for (std::size_t i = 0; storage != nullptr && i < index; ++i) {
    if (storage_of(inputs[i]) == storage) return i;
  }
  return index;
}

}  // namespace

// _fw_grad() takes a lock, which most need not.
bool guard_detail::autograd_knows_tangent(const at::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return (meta->fw_grad_ != nullptr || meta->is_view_) && tensor._fw_grad(0).defined();
}

// What operators that consist of others ask to choose those. It runs before every replay, and each getter is
// a function call. The last ones matter only where there is a GPU.
std::uint32_t switches_of(const at::Context& context) {
  static const bool has_cuda = at::hasCUDA();
  std::uint32_t bits = 0;
  const auto add = [&bits](bool bit) { bits = bits << 1 | (bit ? 1U : 0U); };
  add(context.userEnabledMkldnn());
  add(context.deterministicMkldnn());
  add(context.userEnabledFlashSDP());
  add(context.userEnabledMathSDP());
  add(context.allowFP16BF16ReductionMathSDP());
  if (!has_cuda) return bits;
  add(context.userEnabledCuDNN());
  add(context.benchmarkCuDNN());
  add(context.deterministicCuDNN());
  add(context.userEnabledMemEfficientSDP());
  add(context.userEnabledCuDNNSDP());
  return bits;
}

// Asked before every replay: one look at each of LibTorch's thread-local states.
Environment Environment::now() {
  const at::Context& context = at::globalContext();
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  Environment found{.grad = autograd.get_grad_mode(),
                    .inference = autograd.get_inference_mode(),
                    .deterministic = context.deterministicAlgorithms(),
                    .default_dtype = c10::get_default_dtype_as_scalartype(),
                    .switches = switches_of(context)};
  constexpr std::array kDevices = {std::pair(at::kCPU, c10::DispatchKey::AutocastCPU),
                                   std::pair(at::kCUDA, c10::DispatchKey::AutocastCUDA)};
  for (std::size_t i = 0; i < kDevices.size(); ++i) {
    found.autocast[i] = !excluded.has(kDevices[i].second);
    if (found.autocast[i]) found.autocast_dtype[i] = at::autocast::get_autocast_dtype(kDevices[i].first);
  }
  return found;
}

std::string Environment::str() const {
  std::string text = inference ? "inference mode" : grad ? "with gradients" : "without gradients";
  for (std::size_t i = 0; i < autocast.size(); ++i) {
    if (autocast[i]) text += concat(", autocast to ", autocast_dtype[i], i == 0 ? "" : " on CUDA");
  }
  return deterministic ? text + ", deterministic" : text;
}

InputGuard::InputGuard(std::span<const at::Tensor> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& tensor = inputs[i];
    Input& input = inputs_.emplace_back();
    input.shares_with = i;
    if (!tensor.defined()) continue;
    input.defined = true;
    input.requires_grad = tensor.requires_grad();
    input.keys = tensor.key_set();
    input.is_plain = tensor.layout() == at::kStrided && !tensor.is_nested();
    if (input.is_plain) input.layout = Layout::of(tensor);
    input.dims = input.layout.sizes.size();
    input.numbers = numbers_.size();
    for (const auto* each : {&input.layout.sizes, &input.layout.strides}) {
      numbers_.insert(numbers_.end(), each->begin(), each->end());
    }
    input.dtype = tensor.dtype();
    if (tensor.has_storage()) input.storage_bytes = tensor.storage().nbytes();
    input.shares_with = first_that_shares(inputs, i);
  }
}

// Runs before every replay, so it asks the tensors' implementations and allocates nothing.
bool InputGuard::holds(std::span<const at::Tensor> inputs) const {
  if (inputs.size() != inputs_.size()) return false;
  // 512 bits: a false hit costs a search for the pair, and never gives a wrong answer.
  std::array<std::uint64_t, 8> seen{};  // a bit for each storage, by a hash of its address
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const c10::TensorImpl& tensor = *inputs[i].unsafeGetTensorImpl();
    const Input& input = inputs_[i];
    if (inputs[i].defined() != input.defined) return false;
    if (!input.defined) continue;
    const std::int64_t* const sizes = numbers_.data() + input.numbers;
    // The keys tell devices, but for their number, and inference tensors too.
    if (tensor.key_set() != input.keys || tensor.dtype() != input.dtype ||
        (input.is_plain && !is_laid_out(inputs[i], {sizes, input.dims}, {sizes + input.dims, input.dims})) ||
        tensor.requires_grad() != input.requires_grad ||
        (!input.layout.device.is_cpu() && tensor.device() != input.layout.device)) {
      return false;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(storage_of(inputs[i]));
    if (address == 0) continue;
    const std::uint64_t hash = (address * 0x9E3779B97F4A7C15ULL) >> 55;
    const std::uint64_t bit = std::uint64_t(1) << (hash % 64);
    const bool may_share = (seen[hash / 64] & bit) != 0;
    seen[hash / 64] |= bit;
    if (may_share ? !sharing_holds(inputs, i) : input.shares_with != i) return false;
  }
  return true;
}

bool InputGuard::sharing_holds(std::span<const at::Tensor> inputs, std::size_t index) const {
  const std::size_t shares_with = inputs_[index].shares_with;
  return first_that_shares(inputs, index) == shares_with &&
         inputs[index].storage_offset() - inputs[shares_with].storage_offset() ==
             inputs_[index].layout.offset - inputs_[shares_with].layout.offset;
}

bool InputGuard::storages_hold(std::span<const at::Tensor> inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = inputs_[i];
    if (!input.is_plain || !inputs[i].has_storage()) continue;
    if (inputs[i].storage_offset() != input.layout.offset) return false;
    // as_strided may read up to the end of the recorded storage.
    if (inputs[i].storage().nbytes() < input.storage_bytes) return false;
  }
  return true;
}

std::string InputGuard::str() const {
  base::TextList list;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const Input& input = inputs_[i];
    list.add(input.defined ? input.layout.str() : "undefined",
             input.requires_grad ? " that needs a gradient" : "",
             input.shares_with == i ? "" : concat(" that shares memory with input ", input.shares_with));
  }
  return list.text();
}

ModuleGuard::Held ModuleGuard::Held::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.unsafeGetTensorImpl(), storage_of(tensor), tensor.requires_grad()};
}

ModuleGuard::ModuleGuard(std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  for (const auto& root : modules) {
    for (const auto& module : root->modules(/*include_self=*/true)) {
      Watched watched{module, module->is_training(), {}, {}};
      for (const auto& item : Peek::parameters_of(*module)) {
        watched.parameters.push_back(Held::of(item.value()));
      }
      for (const auto& child : module->children()) watched.children.push_back(child.get());
      watched_.push_back(std::move(watched));
    }
  }
}

bool ModuleGuard::holds() const {
  for (const Watched& watched : watched_) {
    const torch::nn::Module& module = *watched.module;
    if (module.is_training() != watched.training) return false;
    const auto& parameters = Peek::parameters_of(module);
    if (parameters.size() != watched.parameters.size()) return false;
    for (std::size_t i = 0; i < watched.parameters.size(); ++i) {
      if (Held::of(parameters[i].value()) != watched.parameters[i]) return false;
    }
    const auto children = module.children();
    if (children.size() != watched.children.size()) return false;
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (children[i].get() != watched.children[i]) return false;
    }
  }
  return true;
}

namespace {

bool is_one_in(const std::vector<at::Tensor>& tensors, const c10::StorageImpl* storage) {
  return storage != nullptr && std::ranges::any_of(tensors, [storage](const at::Tensor& tensor) {
           return tensor.defined() && tensor.has_storage() && storage_of(tensor) == storage;
         });
}

}  // namespace

bool ModuleGuard::owns(const c10::StorageImpl* storage) const {
  return std::ranges::any_of(watched_, [&](const Watched& watched) {
    return is_one_in(watched.module->parameters(/*recurse=*/false), storage);
  });
}

bool ModuleGuard::has(const c10::StorageImpl* storage) const {
  return owns(storage) || std::ranges::any_of(watched_, [&](const Watched& watched) {
           return is_one_in(watched.module->buffers(/*recurse=*/false), storage);
         });
}

}  // namespace cohort::script
