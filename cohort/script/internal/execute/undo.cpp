#include "cohort/script/internal/execute/undo.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/base/error.h"

namespace cohort::script {

namespace {

core::GeneratorStates states_of(const Tape& tape) {
  if (std::ranges::none_of(tape.calls(), [](const OperatorCall& call) { return call.may_draw(); })) return {};
  std::vector<c10::Device> devices;
  for (const Value& value : tape.values()) devices.push_back(value.layout.device);
  std::vector<at::Generator> generators = core::generators_of_gpus(devices);
  for (const OperatorCall& call : tape.calls()) {
    for (const c10::IValue& argument : call.arguments) {
      if (argument.isGenerator()) generators.push_back(argument.toGenerator());
    }
  }
  return core::GeneratorStates(generators);
}

}  // namespace

GeneratorStates::GeneratorStates(const Tape& tape) : core::GeneratorStates(states_of(tape)) {}

GivenTensors::GivenTensors(const Program& program, const Frame& frame) {
  const Tape& tape = program.trace().tape;
  for (std::size_t slot = 0; slot < tape.values().size(); ++slot) {
    const Value& value = tape.values()[slot];
    const at::Tensor& tensor = frame.values[slot];
    if ((value.source != Source::kInput && value.source != Source::kCaptured) || !tensor.defined()) continue;
    if (tensor.requires_grad() && !tape.is_written(value.storage)) continue;
    const std::uint32_t version = autograd::version_of(tensor);  // first: who writes meanwhile moves it
    kept_.push_back({tensor, tensor.clone(), {}, version});
  }
}

// In two rounds: tensors may overlap.
void GivenTensors::restore() {
  const at::AutoDispatchBelowADInplaceOrView without_counting_versions;
  std::vector<bool> is_changed;
  for (Kept& each : kept_) {
    const bool is_disturbed = autograd::version_of(each.tensor) != each.version;
    was_disturbed_ |= is_disturbed;
    is_changed.push_back(!is_disturbed && !equal_bits(each.tensor, each.before));
    each.found = is_changed.back() ? each.tensor.clone() : each.before;
  }
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    if (is_changed[i]) kept_[i].tensor.copy_(kept_[i].before);
    kept_[i].before.reset();
  }
  is_restored_ = true;
}

GivenTensors::~GivenTensors() {
  if (!is_restored_) restore();
}

std::string GivenTensors::difference_from_found() const {
  for (const Kept& each : kept_) {
    if (equal_bits(each.tensor, each.found)) continue;
    return base::concat("a tensor ", Layout::of(each.tensor).str(),
                        " is left with other values than the program leaves");
  }
  return {};
}

}  // namespace cohort::script
