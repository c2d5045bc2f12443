// How one recording differs from the one before. Calls are compared first: names, constants, slots and modes.
// Then values are compared: storages, layouts and sources. Slots and storages are numbered in the order of
// the recording, so equal numbers mean equal roles at any address. A tensor that is new in each recording
// becomes a constant if its contents are equal. Surprising: equal contents prove nothing if the inputs had
// equal values too. Then such a tensor is rejected, unless it is a single number. Always: the first
// difference is the text that the user reads.
#include <algorithm>
#include <bit>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {
namespace {

using base::concat;

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
  // By bits: NaN repeats, and -0.0 is another argument than 0.0.
  if (a.isDouble() && b.isDouble()) {
    return std::bit_cast<std::uint64_t>(a.toDouble()) == std::bit_cast<std::uint64_t>(b.toDouble());
  }
  if (a.isGenerator() && b.isGenerator()) return a.toGenerator() == b.toGenerator();
  if (a.tagKind() != b.tagKind()) return false;
  return a == b;
}

std::string text_of(const c10::IValue& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace

std::string Tape::user_of(int slot) const {
  for (const OperatorCall& call : calls_) {
    for (const TensorPlace& place : call.inputs) {
      for (const int used : place.slots) {
        if (used == slot) return call.name();
      }
    }
  }
  return "no operator";
}

std::string Tape::difference_of_calls(const OperatorCall& call, const OperatorCall& other) const {
  if (call.op.operator_name() != other.op.operator_name()) {
    return concat("one recording has ", other.name(), " where the next has ", call.name());
  }
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (same_constant(call.arguments[i], other.arguments[i])) continue;
    return concat("argument '", call.op.schema().arguments()[i].name(), "' of ", call.name(), " was ",
                  text_of(other.arguments[i]), " and then ", text_of(call.arguments[i]));
  }
  // C++ may decide by such a number which operators it calls next.
  for (std::size_t i = 0; i < std::min(call.other.size(), other.other.size()); ++i) {
    if (same_constant(call.other[i], other.other[i])) continue;
    return concat(call.name(), " returned ", text_of(other.other[i]), " and then ", text_of(call.other[i]));
  }
  if (call.inputs != other.inputs || call.results != other.results ||
      call.other.size() != other.other.size()) {
    return concat(call.name(), " works on other tensors");
  }
  if (call.keys != other.keys || call.grad_mode != other.grad_mode ||
      call.below_autocast != other.below_autocast) {
    return concat(call.name(), " runs in another mode");
  }
  return {};
}

// Of a tensor that is a new one in each recording. A single number, and what C++ wrote into an empty tensor,
// may be a constant; anything else may come from another thread, or from memory that C++ fills.
std::string Tape::difference_of_contents(int slot, const Value& value, const Value& other,
                                         bool may_be_inputs) const {
  const std::string what = concat("a tensor ", value.layout.str(), " that ", user_of(slot), " uses");
  if (is_written(value.storage)) return concat(what, " is a new one in each recording, and is written to");
  if (!value.snapshot && value.tensor.dim() > 0)
    return concat(what, " comes from no operator of this thread");
  const bool same = equal_bits(value.tensor, other.tensor);
  if (same && value.tensor.dim() > 0 && may_be_inputs) {
    return concat(what, " was filled by C++, maybe from inputs, whose values were the same each time");
  }
  if (same) return {};
  if (value.tensor.dim() > 0)
    return concat(what, " was filled by C++, with other contents in each recording");
  return concat("a number that ", user_of(slot), " uses was ", text_of(other.tensor.item()), " and then ",
                text_of(value.tensor.item()));
}

std::string Tape::difference_of_common_calls(const Tape& before) const {
  for (std::size_t i = 0; i < std::min(calls_.size(), before.calls_.size()); ++i) {
    if (std::string found = difference_of_calls(calls_[i], before.calls_[i]); !found.empty()) return found;
  }
  return {};
}

std::string Tape::difference_so_far(const Tape& before) const {
  if (std::string found = difference_of_common_calls(before); !found.empty()) return found;
  // Fewer calls are no difference: the program's backward has not been recorded yet here.
  if (calls_.size() > before.calls_.size()) return "one recording has more operators than the one before";
  for (std::size_t i = 0; i < std::min(values_.size(), before.values_.size()); ++i) {
    const bool is_input = values_[i].source == Source::kInput;
    if (is_input == (before.values_[i].source == Source::kInput)) continue;
    return concat("a tensor of ", user_of(static_cast<int>(i)), is_input ? " is an input" : " is no input",
                  ", and was not so before");
  }
  return {};
}

std::string Tape::difference(const Tape& before, bool before_is_program) {
  if (std::string found = difference_of_common_calls(before); !found.empty()) return found;
  if (calls_.size() != before.calls_.size()) {
    return concat("one recording has ", before.calls_.size(), " operators and the next ", calls_.size());
  }
  if (values_.size() != before.values_.size()) return "the recordings have different values";
  // Inputs may begin elsewhere in their storages each time, and views of them with them.
  const auto same_layout = [&](const Value& value, const Value& other) {
    Layout expected = other.layout;
    const int first = storages_[value.storage].first;
    if (values_[at_slot(first)].source == Source::kInput && !needs_input_storages_) {
      expected.offset += values_[at_slot(first)].layout.offset - before.values_[at_slot(first)].layout.offset;
    }
    return value.layout == expected;
  };
  const bool may_be_inputs = !before_is_program && has_inputs_ && inputs_hash_ == before.inputs_hash_;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    Value& value = values_[i];
    const Value& other = before.values_[i];
    const int slot = static_cast<int>(i);
    const bool same_source = (value.source == Source::kInput) == (other.source == Source::kInput) &&
                             (value.source == Source::kMade) == (other.source == Source::kMade);
    if (value.storage != other.storage || !same_layout(value, other) || !same_source) {
      return concat("a tensor of ", user_of(slot), " was ", other.layout.str(), " and then ",
                    value.layout.str());
    }
    // Captured memory is read where it lies in each run, so its contents may change.
    const bool is_world = value.source == Source::kCaptured;
    if (!is_world || value.tensor.storage().is_alias_of(other.tensor.storage())) continue;
    if (std::string found = difference_of_contents(slot, value, other, may_be_inputs); !found.empty()) {
      return found;
    }
    value.source = Source::kConstant;
  }
  return {};
}

}  // namespace cohort::script
