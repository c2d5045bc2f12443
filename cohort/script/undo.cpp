#include "cohort/script/undo.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <mutex>

#include "cohort/core/error.h"
#include "cohort/core/random_scope.h"

namespace cohort::script {

GeneratorStates::GeneratorStates(const Tape& tape) {
  if (std::ranges::none_of(tape.calls(), [](const Call& call) { return call.may_draw(); })) return;
  current_ = core::RandomScope::current();
  keep(current_);
  keep(at::globalContext().defaultGenerator(at::kCPU));
  for (const Value& value : tape.values()) {
    if (value.layout.device.is_cuda()) keep(at::globalContext().defaultGenerator(value.layout.device));
  }
  for (const Call& call : tape.calls()) {
    for (const c10::IValue& argument : call.arguments) {
      if (argument.isGenerator()) keep(argument.toGenerator());
    }
  }
}

void GeneratorStates::keep(at::Generator generator) {
  const auto is_kept = [&](const auto& each) { return each.first == generator; };
  if (!generator.defined() || std::ranges::any_of(kept_, is_kept)) return;
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  kept_.emplace_back(std::move(generator), state);
}

void GeneratorStates::put_back() const {
  for (auto [generator, state] : kept_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

bool GeneratorStates::is_current() const {
  return kept_.empty() || core::RandomScope::current() == current_;
}

GivenTensors::GivenTensors(const Program& program, const Frame& frame) {
  const Tape& tape = program.recorded().tape;
  for (std::size_t slot = 0; slot < tape.values().size(); ++slot) {
    const Value& value = tape.values()[slot];
    const at::Tensor& tensor = frame.values[slot];
    if ((value.source != Source::kInput && value.source != Source::kCaptured) || !tensor.defined()) continue;
    if (tensor.requires_grad() && !tape.is_written(value.storage)) continue;
    kept_.push_back({tensor, tensor.clone(), {}});
  }
}

void GivenTensors::put_back() {
  const at::AutoDispatchBelowADInplaceOrView without_counting_versions;
  for (Kept& each : kept_) {
    if (equal_bits(each.tensor, each.before)) {
      each.found = each.before;
    } else {
      each.found = each.tensor.clone();
      each.tensor.copy_(each.before);
    }
    each.before.reset();
  }
}

std::string GivenTensors::difference_from_found() const {
  for (const Kept& each : kept_) {
    if (equal_bits(each.tensor, each.found)) continue;
    return core::concat("a tensor ", Layout::of(each.tensor).str(),
                        " is left with other values than the program leaves");
  }
  return {};
}

}  // namespace cohort::script
