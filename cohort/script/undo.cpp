#include "cohort/script/undo.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>

#include "cohort/core/error.h"
#include "cohort/core/random_scope.h"

namespace cohort::script {

namespace {

at::Generator copy_of(at::Generator generator) {
  if (!generator.defined()) return generator;
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

GeneratorStates::GeneratorStates(const Tape& tape) {
  draws_ = std::ranges::any_of(tape.calls(), [](const Call& call) { return call.may_draw(); });
  if (!draws_) return;
  const at::Generator current = core::RandomScope::current();
  global_ = copy_of(core::RandomScope::global());
  // One generator stays one.
  if (current.defined()) scope_ = current == core::RandomScope::global() ? global_ : copy_of(current);
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
  if (generator == at::detail::getDefaultCPUGenerator() || std::ranges::any_of(kept_, is_kept)) return;
  const at::Tensor state = state_of(generator);
  kept_.emplace_back(std::move(generator), state);
}

GeneratorStates::Again::Again(const GeneratorStates& states) : states_(states) {
  if (!states.draws_) return;
  for (auto [generator, state] : states.kept_) {
    before_.emplace_back(generator, state_of(generator));
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  global_ = copy_of(states.global_);
  scope_ = states.scope_ == states.global_ ? global_ : copy_of(states.scope_);
  draws_.emplace(scope_, global_);
}

GeneratorStates::Again::~Again() {
  for (auto [generator, state] : before_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

GeneratorStates::After GeneratorStates::Again::after() const {
  After found;
  if (!states_.draws_) return found;
  found.global = state_of(global_);
  if (scope_.defined()) found.scope = state_of(scope_);
  return found;
}

bool GeneratorStates::After::holds() const {
  const at::Generator current = core::RandomScope::current();
  return (!global.defined() || at::equal(global, state_of(core::RandomScope::global()))) &&
         (!scope.defined() || (current.defined() && at::equal(scope, state_of(current))));
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

// In two rounds: tensors may overlap.
void GivenTensors::put_back() {
  const at::AutoDispatchBelowADInplaceOrView without_counting_versions;
  std::vector<bool> is_changed;
  for (Kept& each : kept_) {
    is_changed.push_back(!equal_bits(each.tensor, each.before));
    each.found = is_changed.back() ? each.tensor.clone() : each.before;
  }
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    if (is_changed[i]) kept_[i].tensor.copy_(kept_[i].before);
    kept_[i].before.reset();
  }
  is_put_back_ = true;
}

GivenTensors::~GivenTensors() {
  if (!is_put_back_) put_back();
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
