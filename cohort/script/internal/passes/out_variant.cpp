// An operator with an out-variant can write into planned memory. A schema tells which overload that is: the
// same arguments, and one tensor more that is written. Whether it gives the same bits is tried, and not
// assumed. A trial runs it on the values of the warm-up, into memory filled with a pattern, and compares
// bytes. Element-wise operators are also tried in place of an argument. Always: a trial writes to copies
// only. Out-variants that LibTorch generated are passed over: they call the operator and copy, which saves
// nothing.
#include "cohort/script/internal/passes/out_variant.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "cohort/script/internal/ir/boxed.h"
#include "cohort/script/internal/passes/memory_schedule.h"

namespace cohort::script {
namespace {

using Overloads = std::unordered_map<std::string, std::vector<std::string>>;

// Names of overloads by the name of the operator; those that are registered later are none of LibTorch's.
const Overloads& overloads() {
  static const Overloads& all = *new Overloads([] {
    Overloads found;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.overload_name.empty()) continue;
      found[name.name].push_back(name.overload_name);
    }
    return found;
  }());
  return all;
}

// The arguments of `plain`, and a tensor that is written to.
bool is_out_of(const c10::FunctionSchema& out, const c10::FunctionSchema& plain) {
  if (out.arguments().size() != plain.arguments().size() + 1 || out.returns().size() != 1) return false;
  for (std::size_t i = 0; i < plain.arguments().size(); ++i) {
    const c10::Argument &a = out.arguments()[i], &b = plain.arguments()[i];
    if (a.name() != b.name() || *a.real_type() != *b.real_type() || a.alias_info() != nullptr) return false;
  }
  const c10::Argument& last = out.arguments().back();
  return last.type()->kind() == c10::TypeKind::TensorType && last.alias_info() != nullptr &&
         last.alias_info()->isWrite();
}

at::Tensor uninitialized_like(const at::Tensor& like) {
  at::Tensor made = at::empty_strided(like.sizes(), like.strides(), like.options());
  std::memset(made.mutable_data_ptr(), 0x5A, made.storage().nbytes());  // what is not written shows
  return made;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().nbytes() == b.storage().nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.storage().nbytes()) == 0;
}

// Writes into `into` and says whether that is `expected` now.
bool writes(const OperatorCall& out, Tensors& values, const at::Tensor& into, const at::Tensor& expected,
            AllocationLog* log) {
  const void* const memory = into.const_data_ptr();
  torch::jit::Stack stack;
  try {
    const MemoryScope logged(log);
    run_boxed(out, values, stack);
  } catch (const std::exception&) {
    return false;
  }
  // An operator that resizes its out= would leave the planned place.
  return into.const_data_ptr() == memory && into.sizes() == expected.sizes() &&
         into.strides() == expected.strides() && same_bytes(into, expected);
}

}  // namespace

bool is_dense(const Layout& layout) {
  if (layout.offset != 0 || layout.conjugate || layout.negative) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    if (layout.sizes[i] == 0) return false;
    if (layout.sizes[i] > 1) dims.emplace_back(layout.strides[i], layout.sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  for (const auto& [stride, size] : dims) {
    if (stride != numel) return false;
    numel *= size;
  }
  return true;
}

std::optional<OperatorCall> out_variant(const OperatorCall& call, int result) {
  if (!is_pure(call) || call.keys.empty()) return std::nullopt;
  const c10::OperatorName& name = call.op.operator_name();
  const auto found = overloads().find(name.name);
  if (found == overloads().end()) return std::nullopt;
  for (const std::string& overload : found->second) {
    const auto op = c10::Dispatcher::singleton().findSchema({name.name, overload});
    if (!op || op->hasTag(at::Tag::generated) || !is_out_of(op->schema(), call.op.schema())) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    OperatorCall out = call;
    out.op = *op;
    out.arguments.emplace_back();
    out.inputs.push_back(
        {.index = call.arguments.size(), .kind = TensorPlace::ArgumentType::kTensor, .slots = {result}});
    // The result lies in its slot already: nothing is to be stored after the call.
    out.results.clear();
    return out;
  }
  return std::nullopt;
}

Trial try_out(const OperatorCall& out, int result, int over, const Tensors& values, AllocationLog& log) {
  const MemoryScope copies_are_not_logged(nullptr);
  Tensors own = values;
  const at::Tensor& expected = values[at_slot(result)];
  own[at_slot(result)] = uninitialized_like(expected);
  if (!writes(out, own, own[at_slot(result)], expected, &log)) return Trial::kFails;
  if (over == kUndefined) return Trial::kWrites;
  own[at_slot(over)] = uninitialized_like(values[at_slot(over)]).copy_(values[at_slot(over)]);
  // Another handle of the same memory, as in a replay.
  own[at_slot(result)] = shallow_copy(own[at_slot(over)]);
  return writes(out, own, own[at_slot(result)], expected, nullptr) ? Trial::kReplaces : Trial::kWrites;
}

}  // namespace cohort::script
