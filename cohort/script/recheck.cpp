#include "cohort/script/recheck.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>

#include "cohort/core/error.h"
#include "cohort/core/random_scope.h"

namespace cohort::script {
namespace {

using core::concat;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape({-1}).view(at::kByte);
  };
  return at::equal(bytes(a), bytes(b));
}

// Every generator that a tape may draw from, with its state; put back when it ends.
class Generators {
 public:
  explicit Generators(const Tape& tape) {
    keep(core::RandomScope::current());
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
  ~Generators() {
    for (auto& [generator, state] : kept_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  Generators(const Generators&) = delete;
  Generators& operator=(const Generators&) = delete;

 private:
  void keep(at::Generator generator) {
    const auto is_kept = [&](const auto& each) { return each.first == generator; };
    if (!generator.defined() || std::any_of(kept_.begin(), kept_.end(), is_kept)) return;
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    kept_.emplace_back(std::move(generator), state);
  }

  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
};

}  // namespace

Recheck::Recheck(const Program& program, const Tensors& inputs) {
  const at::NoGradGuard no_grad;
  const Generators generators(program.recorded().tape);
  run(program, inputs);
}

void Recheck::run(const Program& program, const Tensors& inputs) {
  const Recorded& recorded = program.recorded();
  auto frame = program.borrow();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (recorded.inputs[i] >= 0) frame->values[at_slot(recorded.inputs[i])] = inputs[i];
  }
  // Batch norms write to running statistics without saying so in their schema: whatever is given and needs no
  // gradient may be written to.
  const auto& values = recorded.tape.values();
  Tensors before;
  for (std::size_t slot = 0; slot < values.size(); ++slot) {
    const bool is_given = values[slot].source == Source::kInput || values[slot].source == Source::kCaptured;
    const at::Tensor& tensor = frame->values[slot];
    if (!is_given || !tensor.defined()) continue;
    if (tensor.requires_grad() && !recorded.tape.is_written(values[slot].storage)) continue;
    written_.emplace_back(tensor, at::Tensor());
    before.push_back(tensor.clone());
  }
  const auto take = [&](const std::vector<int>& slots, Tensors& to) {
    for (const int slot : slots) {
      to.push_back(slot == kUndefined ? at::Tensor() : frame->values[at_slot(slot)].clone());
    }
  };
  try {
    program.forward(*frame);
    take(recorded.outputs, results_);
    if (!recorded.has_backward) take(recorded.gradients, gradients_);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  const at::AutoDispatchBelowADInplaceOrView without_counting_versions;
  for (std::size_t i = 0; i < before.size(); ++i) {
    written_[i].second = written_[i].first.clone();
    written_[i].first.copy_(before[i]);
  }
  if (error_.empty()) program.give_back(std::move(frame));
}

std::string Recheck::difference(const Tensors& results, const Tensors& gradients) const {
  const at::NoGradGuard no_grad;
  if (!error_.empty()) return concat("the program throws: ", error_);
  const auto compare = [](const Tensors& ours, const Tensors& theirs, const char* what) -> std::string {
    if (ours.size() != theirs.size()) return concat("there are other ", what, "s");
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (!same_bits(ours[i], theirs[i]))
        return concat(what, " ", i, " has other values than the program computes");
    }
    return {};
  };
  if (std::string found = compare(results_, results, "result"); !found.empty()) return found;
  if (std::string found = compare(gradients_, gradients, "gradient"); !found.empty()) return found;
  for (const auto& [tensor, left] : written_) {
    if (!same_bits(tensor, left)) {
      return concat("a tensor ", Layout::of(tensor).str(),
                    " is left with other values than the program leaves");
    }
  }
  return {};
}

}  // namespace cohort::script
