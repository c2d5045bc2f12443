// Which elements of a storage no operator filled, and what becomes of them: Note [What C++ wrote].
//
// Each storage that an operator leaves as it came has a list of its filled elements. An operator that
// overwrites elements adds them to the list. Before a call reads other elements, the tape gets one more call,
// which writes the unfilled elements from a constant. Invariant: a replay reads no element that neither an
// operator nor such a call wrote. A copy of the storage when it is made would be too early, since C++ writes
// later. A constant of the whole storage would overwrite elements that operators fill anew in each run.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {
namespace {

using ArgumentType = TensorPlace::ArgumentType;

bool covers_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

// The storage of `tensor`, as a list of elements of this type.
at::Tensor flat(const at::Tensor& tensor, c10::ScalarType dtype) {
  const auto numel = static_cast<std::int64_t>(tensor.storage().nbytes() / c10::elementSize(dtype));
  return at::empty({0}, tensor.options().dtype(dtype)).set_(tensor.storage(), 0, {numel}, {1});
}

std::int64_t num_storage_elements(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.itemsize());
}

// Of a list with an entry for each element of the tensor's storage: the tensor's own entries.
at::Tensor part_of(const at::Tensor& list, const at::Tensor& tensor) {
  return list.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// As many of a list's entries as there are now; new ones are zero.
at::Tensor resized(const at::Tensor& list, std::int64_t numel) {
  if (list.numel() == numel) return list;
  at::Tensor made = at::zeros({numel}, list.options());
  const std::int64_t common = std::min(list.numel(), numel);
  made.narrow(0, 0, common).copy_(list.narrow(0, 0, common));
  return made;
}

}  // namespace

// Note [What C++ wrote]
// torch::tensor({1, 2}) makes an empty tensor and fills it without an operator. A replay writes the same
// contents, if a second recording has them too. What zeros(), arange() and the like made is made again at its
// first use: if it differs, C++ wrote over it.

// To be asked before a call reads elements of `tensor`, or overwrites all of them.
void Tape::find_contents(int slot, const at::Tensor& tensor, bool is_overwritten) {
  const std::size_t number = values_[at_slot(slot)].storage;
  Storage& storage = storages_[number];
  if (storage.unfilled == Unfilled::kNone || tensor.numel() == 0) return;
  if (is_overwritten && (storage.unfilled != Unfilled::kFactory || covers_storage(tensor))) return;
  const c10::ScalarType dtype = values_[at_slot(storage.first)].layout.dtype;
  if (storage.unfilled == Unfilled::kFactory) {
    storage.unfilled = Unfilled::kNone;
    torch::jit::Stack stack = calls_[storage.made_by].arguments;
    calls_[storage.made_by].op.callBoxed(&stack);
    if (!equal_bits(flat(stack.back().toTensor(), dtype), flat(tensor, dtype))) snapshot(number, tensor);
    return;
  }
  const bool is_filled = storage.unfilled == Unfilled::kSome && tensor.scalar_type() == dtype &&
                         storage.filled.numel() == num_storage_elements(tensor) &&
                         part_of(storage.filled, tensor).all().item<bool>();
  if (!is_filled) snapshot(number, tensor);
}

// To be told after a call has overwritten all elements of `tensor`.
void Tape::mark_filled(int slot, const at::Tensor& tensor) {
  Storage& storage = storages_[values_[at_slot(slot)].storage];
  if (storage.unfilled == Unfilled::kNone) return;
  if (covers_storage(tensor)) {
    storage.unfilled = Unfilled::kNone;
    storage.filled.reset();
    return;
  }
  if (tensor.scalar_type() != values_[at_slot(storage.first)].layout.dtype) return;
  if (storage.unfilled == Unfilled::kAll) storage.filled = at::zeros({0}, at::TensorOptions(at::kBool));
  storage.unfilled = Unfilled::kSome;
  storage.filled = resized(storage.filled, num_storage_elements(tensor));
  part_of(storage.filled, tensor).fill_(true);
}

void Tape::snapshot(std::size_t number, const at::Tensor& tensor) {
  static const auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  static const auto where = c10::Dispatcher::singleton().findSchemaOrThrow("aten::where", "self_out");
  const at::Tensor filled = std::exchange(storages_[number].filled, at::Tensor());
  storages_[number].unfilled = Unfilled::kNone;
  const int first = storages_[number].first;
  const Layout layout = values_[at_slot(first)].layout;
  at::Tensor all = flat(tensor, layout.dtype);
  if (layout.bytes() == static_cast<std::int64_t>(tensor.storage().nbytes())) {  // as a rule
    const at::Tensor of_first = all.as_strided(layout.sizes, layout.strides, layout.offset);
    if (covers_storage(of_first)) all = of_first;
  }
  int whole = find(all);
  if (whole == kUnknown) whole = restride(first, all);
  const auto as_constant = [this](const at::Tensor& contents) {
    const int slot = add(contents, Source::kCaptured);
    values_.back().snapshot = true;
    return slot;
  };
  const auto place = [](std::size_t index, int slot) {
    return TensorPlace{.index = index, .kind = ArgumentType::kTensor, .fresh_handle = false, .slots = {slot}};
  };
  if (!filled.defined()) {
    OperatorCall call(copy);
    call.arguments = {c10::IValue(), c10::IValue(), false};
    call.inputs = {place(0, whole), place(1, as_constant(all.clone()))};
    call.results = {place(0, whole)};
    call.num_results = 1;
    calls_.push_back(std::move(call));
    return;
  }
  const at::Tensor known =
      resized(filled, all.numel()).to(all.device()).as_strided(all.sizes(), all.strides(), 0);
  OperatorCall call(where);
  call.arguments = {c10::IValue(), c10::IValue(), c10::IValue(), c10::IValue()};
  call.inputs = {place(0, as_constant(known.clone())), place(1, whole),
                 place(2, as_constant(all.masked_fill(known, 0))), place(3, whole)};
  call.results = {place(0, whole)};
  call.num_results = 1;
  calls_.push_back(std::move(call));
}

}  // namespace cohort::script
