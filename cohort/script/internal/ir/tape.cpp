// The recorder hands each operator call to call() before the kernel runs. Tensor arguments become slots, the
// kernel runs, and tensor results become slots. A slot is found by storage and layout, so all handles of one
// view share it. A tensor of an unknown storage is captured, and so is each view of it. Another view that no
// operator made gets an as_strided call, so that a replay makes it too. Always: a slot keeps its number, and
// Value::storage is an index in storages_. Surprising: what cannot be replayed does not stop the recording.
// The first reason is kept, and the function continues.
#include "cohort/script/internal/ir/tape.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <unordered_set>

#include "cohort/base/error.h"

namespace cohort::script {
namespace {

using base::concat;
using ArgumentType = TensorPlace::ArgumentType;

// equal(x, x), as multi-head attention asks to find self-attention, is no question about elements.
bool compares_with_itself(const OperatorCall& call) {
  return call.op.operator_name().name == "aten::equal" && call.inputs.size() == 2 &&
         call.inputs[0].slots == call.inputs[1].slots;
}

bool is_write(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// True if every element of `argument` gets a value that does not depend on what was there.
bool overwrites(const OperatorCall& call, const c10::Argument& argument) {
  if (!is_write(argument)) return false;
  if (argument.is_out() || argument.name() == "noise") return true;  // rrelu_with_noise's
  static const std::unordered_set<std::string_view> names = {
      "aten::copy_",      "aten::fill_",        "aten::zero_",     "aten::normal_",
      "aten::uniform_",   "aten::exponential_", "aten::cauchy_",   "aten::log_normal_",
      "aten::geometric_", "aten::random_",      "aten::bernoulli_"};
  return names.count(call.op.operator_name().name) != 0;
}

// Operators in place that give a tensor another shape, and leave its elements alone.
bool changes_shape_only(const OperatorCall& call) {
  static const std::unordered_set<std::string_view> names = {
      "aten::resize_",    "aten::resize_as_",  "aten::squeeze_",  "aten::unsqueeze_", "aten::t_",
      "aten::transpose_", "aten::as_strided_", "aten::swapaxes_", "aten::swapdims_",  "aten::detach_"};
  return names.count(call.op.operator_name().name) != 0;
}

// The type of an IValue that stands for the same thing in every run, or nothing.
const char* unusable(const c10::IValue& value) {
  if (value.isObject()) return "an object of a custom class";
  if (value.isFuture() || value.isRRef() || value.isPyObject() || value.isCapsule()) return "a handle";
  if (value.isStorage()) return "a storage";
  return nullptr;
}

void visit(const c10::IValue& value, TensorPlace& place, const auto& slot_of) {
  if (value.isTensor()) {
    place.slots.push_back(slot_of(value.toTensor()));
  } else if (value.isTensorList()) {
    place.kind = ArgumentType::kList;
    for (const at::Tensor& tensor : value.toTensorVector()) place.slots.push_back(slot_of(tensor));
  } else {
    place.kind = ArgumentType::kOptionalList;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      place.slots.push_back(tensor ? slot_of(*tensor) : kUndefined);
    }
  }
}

// A tensor that sizes, strides and a storage with values describe.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_nested() &&
         !tensor.is_quantized() && !tensor.is_meta() && !tensor._is_zerotensor();
}

std::string kind_of(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "nested tensor";
  if (tensor.is_meta()) return "tensor on the meta device, which has no values";
  if (tensor._is_zerotensor()) return "zero tensor, which has no memory";
  return tensor.is_quantized() ? "quantized tensor" : concat("tensor of layout ", tensor.layout());
}

// If two recordings had equal inputs, equal contents of another tensor do not show that it is a constant.
std::size_t hash_of_contents(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
}

// Names of operators with an overload that has the tag.
const std::unordered_set<std::string>& names_with_sizes_by_numbers() {
  static const auto known = [] {
    std::unordered_set<std::string> names;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (op && op->hasTag(at::Tag::dynamic_output_shape)) names.insert(name.name);
    }
    return names;
  }();
  return known;
}

// True if the sizes of results depend on values. The tag is on the overload that makes its result, and not on
// the one that takes it as out=.
bool sizes_by_numbers(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (op.hasTag(at::Tag::dynamic_output_shape) ||
      name == "aten::_pack_padded_sequence") {  // which has no tag
    return true;
  }
  const auto& arguments = op.schema().arguments();
  return !arguments.empty() && arguments.back().is_out() && names_with_sizes_by_numbers().count(name) != 0;
}

// Operators that fill a new tensor from numbers alone, and can do it again.
bool is_factory(const OperatorCall& call) {
  static const std::unordered_set<std::string_view> names = {
      "aten::zeros",    "aten::ones",     "aten::full",          "aten::arange",       "aten::eye",
      "aten::linspace", "aten::logspace", "aten::scalar_tensor", "aten::tril_indices", "aten::triu_indices"};
  return call.inputs.empty() && call.num_results == 1 && names.count(call.op.operator_name().name) != 0;
}

bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

}  // namespace

Tape::Tape(std::vector<OperatorCall> calls, std::vector<Value> values, const std::vector<bool>& written,
           std::vector<ForkedCalls> forked)
    : calls_(std::move(calls)), values_(std::move(values)), forked_(std::move(forked)) {
  // No storage is held and no address is known: a loaded tape is replayed, and never recorded to.
  for (const bool is_written : written) {
    storages_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>()),
                         kUndefined,
                         0,
                         false,
                         is_written,
                         Unfilled::kNone,
                         {},
                         0});
  }
  // From the back, so that `first` ends as the first value of its storage.
  for (std::size_t slot = values_.size(); slot-- > 0;) {
    Storage& storage = storages_.at(values_[slot].storage);
    storage.first = static_cast<int>(slot);
    storage.made = values_[slot].source == Source::kMade;
  }
}

// Device, conjugate and negative bits are not hashed: few keys differ in them alone, and == compares them.
std::size_t Tape::KeyHash::operator()(const Key& key) const {
  std::size_t hash = std::hash<const void*>()(key.storage);
  const auto mix = [&hash](std::int64_t number) {
    hash = (hash ^ static_cast<std::size_t>(number)) * 0x9E3779B97F4A7C15ULL;
  };
  mix(key.layout.offset);
  mix(static_cast<std::int64_t>(key.layout.dtype));
  for (const std::int64_t size : key.layout.sizes) mix(size);
  for (const std::int64_t stride : key.layout.strides) mix(stride);
  return hash;
}

void Tape::begin_fork() {
  if (open_forks_++ == 0) forked_.push_back({calls_.size(), calls_.size()});
}

void Tape::end_fork() {
  if (--open_forks_ == 0) forked_.back().end = calls_.size();
}

void Tape::mark_unsupported(std::string reason) {
  if (unsupported_reason_.empty()) unsupported_reason_ = std::move(reason);
}

int Tape::find(const at::Tensor& tensor) const {
  if (!tensor.defined()) return kUndefined;
  if (!is_plain(tensor)) return kUnknown;
  const auto found = slots_.find({tensor.storage().unsafeGetStorageImpl(), Layout::of(tensor)});
  return found == slots_.end() ? kUnknown : found->second;
}

int Tape::find_result(const at::Tensor& tensor) {
  const int slot = find(tensor);
  if (slot < 0) return slot;
  find_contents(slot, tensor, /*is_overwritten=*/false);
  return slot;
}

bool Tape::knows_storage(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.has_storage() &&
         storage_numbers_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

int Tape::add(const at::Tensor& tensor, Source source) {
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto [known, is_new] = storage_numbers_.try_emplace(storage, storages_.size());
  const int slot = static_cast<int>(values_.size());
  if (is_new) {
    storages_.push_back({tensor.storage().getWeakStorageImpl(), slot, 0, source == Source::kMade, false,
                         Unfilled::kNone, at::Tensor(), 0});
  }
  // restride() compares this size to see a resize that no operator made.
  storages_[known->second].bytes = tensor.storage().nbytes();
  Layout layout = Layout::of(tensor);
  slots_.emplace(Key{storage, layout}, slot);
  // Inputs and made values are not held, so that memory is freed during recording as in eager mode.
  const bool keep = source == Source::kCaptured || source == Source::kConstant;
  values_.push_back({source, std::move(layout), known->second, keep ? tensor : at::Tensor(), false});
  return slot;
}

int Tape::add_input(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  if (!is_plain(tensor)) {
    mark_unsupported(concat("an input is a ", kind_of(tensor)));
    return kUndefined;
  }
  has_inputs_ = true;
  inputs_hash_ = inputs_hash_ * 31 + hash_of_contents(tensor);
  const int known = find(tensor);
  return known == kUnknown ? add(tensor, Source::kInput) : known;
}

// Kernels of operators that are made of others resize their out= without an operator.
int Tape::resize(int base, const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::resize_", "");
  if (!tensor.is_contiguous() || tensor.storage_offset() != 0) {
    mark_unsupported(concat("a tensor was resized to ", Layout::of(tensor).str(), " by no operator"));
  }
  const int slot = add(tensor, Source::kMade);
  OperatorCall call(op);
  call.arguments = {c10::IValue(), tensor.sizes().vec(), c10::IValue()};
  call.inputs = {{.index = 0, .kind = ArgumentType::kTensor, .fresh_handle = true, .slots = {base}}};
  call.results = {{.index = 0, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {slot}}};
  call.num_results = 1;
  calls_.push_back(std::move(call));
  return slot;
}

// A view that no operator made: kernels and autograd build some by hand.
int Tape::restride(int base, const at::Tensor& tensor) {
  const Value& from = values_[static_cast<std::size_t>(base)];
  if (tensor.storage().nbytes() != storages_[from.storage].bytes) {
    if (from.source == Source::kMade) return resize(base, tensor);
    mark_unsupported(
        concat("the memory of a tensor ", from.layout.str(), " that it did not make is resized"));
  }
  if (from.layout.dtype != tensor.scalar_type() || tensor.is_conj() || tensor.is_neg()) {
    mark_unsupported(concat("a tensor ", Layout::of(tensor).str(), " is another view of ", from.layout.str(),
                            " that no operator made"));
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
  // The offset of as_strided counts from the storage's begin, so the guard must fix where an input begins.
  needs_input_storages_ |= is_of_input(base);
  const int slot = add(tensor, Source::kMade);
  OperatorCall call(op);
  call.arguments = {c10::IValue(), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
  call.inputs = {{.index = 0, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {base}}};
  call.results = {{.index = 0, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {slot}}};
  call.num_results = 1;
  call.is_view = true;
  calls_.push_back(std::move(call));
  return slot;
}

int Tape::use(const at::Tensor& tensor, const OperatorCall& call) {
  if (!tensor.defined()) return kUndefined;
  if (!is_plain(tensor)) {
    mark_unsupported(concat(call.name(), " takes a ", kind_of(tensor)));
    return kUndefined;
  }
  int slot = find(tensor);
  if (slot == kUnknown) {
    const auto known = storage_numbers_.find(tensor.storage().unsafeGetStorageImpl());
    // A captured tensor is held by the tape, so each view of it can be held too, without a call.
    const bool is_world =
        known == storage_numbers_.end() ||
        values_[static_cast<std::size_t>(storages_[known->second].first)].source == Source::kCaptured;
    slot = is_world ? add(tensor, Source::kCaptured) : restride(storages_[known->second].first, tensor);
    if (is_world && tensor._fw_grad(0).defined()) {
      mark_unsupported(concat(call.name(), " uses a captured tensor with a tangent of forward-mode AD"));
    }
  }
  return slot;
}

int Tape::made(const at::Tensor& tensor, const OperatorCall& call) {
  if (!tensor.defined()) return kUndefined;
  if (!is_plain(tensor)) {
    mark_unsupported(concat(call.name(), " returns a ", kind_of(tensor)));
    return kUndefined;
  }
  const int known = find(tensor);
  if (known != kUnknown) return known;
  const bool is_new = !knows_storage(tensor);
  const int slot = add(tensor, Source::kMade);
  // From here on: memory that no value of the tape had before. Its counter is watched, and its contents.
  if (!is_new) return slot;
  check_version(tensor, slot);
  Storage& storage = storages_[values_[at_slot(slot)].storage];
  if (call.is_uninitialized_factory()) {
    storage.unfilled = Unfilled::kAll;
  } else if (is_factory(call) && tensor.storage().data() != nullptr) {
    storage.unfilled = Unfilled::kFactory;
    // The call itself is appended after its results, so this is its number.
    storage.made_by = calls_.size();
  }
  return slot;
}

void Tape::take_arguments(OperatorCall& call, const torch::jit::Stack& stack, std::vector<Written>& written) {
  const auto& arguments = call.op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  const bool looks_at_elements = !call.reads_shape_only() && !changes_shape_only(call);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (!holds_tensors(value)) {
      if (const char* what = unusable(value)) mark_unsupported(concat(call.name(), " takes ", what));
      call.arguments.push_back(value);
      continue;
    }
    call.arguments.emplace_back();
    const bool writes = is_write(arguments[i]);
    const bool is_view_of = !writes && arguments[i].alias_info() != nullptr;
    TensorPlace place{.index = i, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {}};
    visit(value, place, [&](const at::Tensor& tensor) {
      const int slot = use(tensor, call);
      if (slot < 0) return slot;
      check_version(tensor, slot);
      const bool is_overwritten = overwrites(call, arguments[i]);
      // A view reads no elements, and C++ may still fill the memory after it.
      if (looks_at_elements && !is_view_of) find_contents(slot, tensor, is_overwritten);
      if (writes) written.push_back({tensor, call.inputs.size(), slot, is_overwritten});
      return slot;
    });
    call.inputs.push_back(std::move(place));
  }
}

// Tensors whose sizes, strides or storage the operator changed (squeeze_, resize_, an out= of another size).
void Tape::find_new_layouts(OperatorCall& call, const std::vector<Written>& written) {
  for (const Written& each : written) {
    if (find(each.tensor) == each.slot) continue;
    if (values_[static_cast<std::size_t>(each.slot)].source != Source::kMade) {
      mark_unsupported(concat(call.name(), " changes the shape of a tensor that it did not make"));
    }
    TensorPlace& place = call.inputs[each.place];
    if (!call.op.schema().returns().empty()) {
      place.fresh_handle = true;
      made(each.tensor, call);
      continue;
    }
    // Nothing of it comes back from the operator: the tensor has its size before.
    const int sized = resize(each.slot, each.tensor);
    std::replace(place.slots.begin(), place.slots.end(), each.slot, sized);
  }
}

void Tape::take_results(OperatorCall& call, const torch::jit::Stack& stack) {
  const auto& returns = call.op.schema().returns();
  const std::size_t first = stack.size() - returns.size();
  call.num_results = returns.size();
  call.is_view = !returns.empty();
  for (std::size_t i = 0; i < returns.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    call.is_view &= returns[i].alias_info() != nullptr && !is_write(returns[i]);
    if (!holds_tensors(value)) {
      if (const char* what = unusable(value)) mark_unsupported(concat(call.name(), " returns ", what));
      call.other.push_back(value);
      call.is_view = false;
      continue;
    }
    TensorPlace place{.index = i, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {}};
    visit(value, place, [&](const at::Tensor& tensor) { return made(tensor, call); });
    call.results.push_back(std::move(place));
  }
}

void Tape::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  OperatorCall call(
      op, keys.remove(c10::DispatchKey::CustomRNGKeyId));  // a RandomScope is no part of the function
  call.grad_mode = at::GradMode::is_enabled();
  for (std::size_t i = 0; i < kAutocastKeys.size(); ++i) {
    call.below_autocast[i] = c10::impl::tls_is_dispatch_key_excluded(kAutocastKeys[i]);
  }
  std::vector<Written> written;
  // Before the kernel: it may change sizes, and it replaces the arguments on the stack by results.
  take_arguments(call, *stack, written);
  if (sizes_by_numbers(op) && !indexes_by_numbers(call)) {
    mark_unsupported(concat(call.name(), " returns a tensor whose size depends on values"));
  }
  if (op.hasTag(at::Tag::data_dependent_output) && !compares_with_itself(call)) {
    mark_unsupported(concat(call.name(), " hands a number of a tensor to C++ (item(), an `if` on a tensor)"));
  }
  op.redispatchBoxed(keys, stack);
  absorb_versions(call);
  mark_written(written);
  find_new_layouts(call, written);
  take_results(call, *stack);
  // The function's own as_strided has an absolute offset too, as that of restride().
  if (call.op.operator_name().name == "aten::as_strided" && !call.inputs.empty()) {
    const int base = call.inputs.front().slots.front();
    needs_input_storages_ |= base >= 0 && is_of_input(base);
  }
  calls_.push_back(std::move(call));
}

// x.index({i, j}) with indices, and not masks: the sizes of its result are theirs.
bool Tape::indexes_by_numbers(const OperatorCall& call) const {
  if (call.op.operator_name().name != "aten::index") return false;
  const auto& indices = call.inputs.at(1).slots;
  return std::none_of(indices.begin(), indices.end(), [this](int slot) {
    if (slot == kUndefined) return false;
    const auto type = slot >= 0 ? values_[at_slot(slot)].layout.dtype : c10::ScalarType::Undefined;
    return type != at::kLong && type != at::kInt;
  });
}

// An input or a view of one.
bool Tape::is_of_input(int slot) const {
  const int first = storages_[values_[at_slot(slot)].storage].first;
  return values_[at_slot(first)].source == Source::kInput;
}

std::string Tape::str() const {
  std::ostringstream out;
  const auto print = [&](const std::vector<TensorPlace>& places) {
    for (const TensorPlace& place : places) {
      for (const int slot : place.slots) out << " %" << slot;
    }
  };
  for (const OperatorCall& call : calls_) {
    print(call.results);
    out << " = " << call.name();
    print(call.inputs);
    out << '\n';
  }
  return out.str();
}

}  // namespace cohort::script
