#include "cohort/script/recheck.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>
#include <utility>

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

// What backward changes apart from gradients is changed by the function's own already.
bool backward_writes_outside(const Recorded& recorded) {
  const auto& calls = recorded.tape.calls();
  for (std::size_t i = recorded.split; i < calls.size(); ++i) {
    if (!calls[i].op.schema().is_mutable()) continue;
    bool is_outside = false;
    each_slot(calls[i].inputs,
              [&](int slot) { is_outside |= recorded.tape.values()[at_slot(slot)].source != Source::kMade; });
    if (is_outside) return true;
  }
  return false;
}

std::string compare(const Tensors& ours, const Tensors& theirs, const char* what) {
  if (ours.size() != theirs.size()) return concat("there are other ", what, "s");
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (!same_bits(ours[i], theirs[i]))
      return concat(what, " ", i, " has other values than the program computes");
  }
  return {};
}

}  // namespace

Recheck::Recheck(std::shared_ptr<const Program> program, const Tensors& inputs)
    : program_(std::move(program)) {
  const at::NoGradGuard no_grad;
  const Generators generators(program_->recorded().tape);
  run(inputs);
}

void Recheck::run(const Tensors& inputs) {
  const Recorded& recorded = program_->recorded();
  auto frame = program_->borrow(inputs);
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
    program_->forward(*frame);
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
  if (!error_.empty()) return;
  if (recorded.has_backward) {
    frame_ = std::move(frame);
  } else {
    program_->give_back(std::move(frame));
  }
}

std::string Recheck::difference(const Tensors& results, const Tensors& gradients) const {
  const at::NoGradGuard no_grad;
  if (!error_.empty()) return concat("the program throws: ", error_);
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

std::string Recheck::difference_in_backward(const Tensors& tangents, const Tensors& gradients) {
  const auto frame = std::move(frame_);
  const Recorded& recorded = program_->recorded();
  if (frame == nullptr || tangents.size() != recorded.tangents.size() || backward_writes_outside(recorded)) {
    return {};
  }
  const auto& values = recorded.tape.values();
  for (std::size_t i = 0; i < tangents.size(); ++i) {
    const int slot = recorded.tangents[i];
    if (Layout::of(tangents[i]) != values[at_slot(slot)].layout) return {};  // bits may then be others
    frame->values[at_slot(slot)] = tangents[i];
  }
  const at::NoGradGuard no_grad;
  const Generators generators(recorded.tape);
  Tensors found;
  try {
    program_->backward(*frame, recorded.split, recorded.tape.calls().size());
    for (const int slot : recorded.gradients) {
      found.push_back(slot == kUndefined ? at::Tensor() : frame->values[at_slot(slot)]);
    }
  } catch (const std::exception& error) {
    return concat("the program's backward throws: ", error.what());
  }
  return compare(found, gradients, "gradient");
}

}  // namespace cohort::script
