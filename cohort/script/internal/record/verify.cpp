// The program runs first, on the real inputs and with copies of generators, and what it wrote is restored.
// Then the function runs as usual. Both are compared: results, gradients, and what is left in written
// tensors. Backward is compared when the gradients of results are known, and a frame with forward's values
// waits for it. Always: the caller gets what the function computed. Surprising: an error of the program is a
// difference, and no exception. Where other threads drew or wrote meanwhile, a difference says little
// (is_alone).
#include "cohort/script/internal/record/verify.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>

#include <algorithm>
#include <span>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::script {
namespace {

using base::concat;

// Bit by bit on the CPU. Kernels on a GPU that add in any order repeat their results to some digits only.
bool same(const at::Tensor& ours, const at::Tensor& theirs) {
  if (equal_bits(ours, theirs)) return true;
  if (!ours.defined() || !theirs.defined() || ours.device().is_cpu()) return false;
  if (ours.sizes() != theirs.sizes() || ours.scalar_type() != theirs.scalar_type()) return false;
  if (!at::isFloatingType(ours.scalar_type()) && !at::isComplexType(ours.scalar_type())) return false;
  const bool is_half = c10::elementSize(ours.scalar_type()) == 2;
  // Of the largest element, since a sum in another order errs by a share of its terms.
  const double tolerance = is_half ? 2e-2 : 1e-4;
  const double largest = theirs.numel() == 0 ? 0 : theirs.detach().abs().max().item<double>();
  return at::allclose(ours.detach(), theirs.detach(), tolerance, tolerance * largest, /*equal_nan=*/true);
}

// What backward changes apart from gradients is changed by the function's own already.
bool backward_writes_outside(const Trace& trace) {
  const auto& calls = trace.tape.calls();
  for (std::size_t i = trace.split; i < calls.size(); ++i) {
    bool is_outside = false;
    each_written(calls[i],
                 [&](int slot) { is_outside |= trace.tape.values()[at_slot(slot)].source != Source::kMade; });
    if (is_outside) return true;
  }
  return false;
}

// Random numbers, or it may: and may then write to what it is handed without saying so.
bool backward_may_draw(const Trace& trace) {
  const auto backward = std::span(trace.tape.calls()).subspan(trace.split);
  return std::ranges::any_of(backward, [](const OperatorCall& call) { return call.may_draw(); });
}

std::string compare(const Tensors& ours, const Tensors& theirs, const char* what) {
  if (ours.size() != theirs.size()) return concat("there are other ", what, "s");
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (!same(ours[i], theirs[i])) return concat(what, " ", i, " has other values than the program computes");
  }
  return {};
}

}  // namespace

Verification::Verification(std::shared_ptr<const Program> program, const Tensors& inputs)
    : program_(std::move(program)) {
  const at::NoGradGuard no_grad;
  const GeneratorStates states(program_->trace().tape);
  const GeneratorStates::Again again(states);
  run(inputs);
  after_ = again.after();
}

void Verification::run(const Tensors& inputs) {
  const Trace& trace = program_->trace();
  auto frame = program_->borrow(inputs);
  given_.emplace(*program_, *frame);
  const auto take = [&](const std::vector<int>& slots, Tensors& to) {
    for (const int slot : slots) {
      // Copies: restore() and the function write to memory that a result may share.
      to.push_back(slot == kUndefined ? at::Tensor() : frame->values[at_slot(slot)].clone());
    }
  };
  try {
    program_->forward(*frame);
    take(trace.outputs, results_);
    if (!trace.has_backward) take(trace.gradients, gradients_);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  // After an error too: the program may have written before it threw.
  given_->restore();
  if (!error_.empty()) return;
  if (trace.has_backward) {
    frame_ = std::move(frame);
  } else {
    program_->give_back(std::move(frame));
  }
}

std::string Verification::difference(const Tensors& results, const Tensors& gradients) {
  const at::NoGradGuard no_grad;
  drew_alone_ = after_.holds();
  if (!error_.empty()) return concat("the program throws: ", error_);
  if (std::string found = compare(results_, results, "result"); !found.empty()) return found;
  if (std::string found = compare(gradients_, gradients, "gradient"); !found.empty()) return found;
  return given_->difference_from_found();
}

bool Verification::takes(const Tensors& grad_outputs) const {
  const Trace& trace = program_->trace();
  if (grad_outputs.size() != trace.grad_outputs.size()) return false;
  for (std::size_t i = 0; i < grad_outputs.size(); ++i) {  // bits may be others where layouts are
    if (grad_outputs[i].defined() != (trace.grad_outputs[i] != kUndefined)) return false;
    if (!grad_outputs[i].defined()) continue;
    if (Layout::of(grad_outputs[i]) != trace.tape.values()[at_slot(trace.grad_outputs[i])].layout)
      return false;
  }
  return true;
}

void Verification::begin_backward() {
  const Trace& trace = program_->trace();
  if (trace.has_backward && backward_may_draw(trace)) states_.emplace(trace.tape);
}

std::string Verification::difference_in_backward(const Tensors& grad_outputs, const Tensors& gradients) {
  const auto frame = std::move(frame_);
  const Trace& trace = program_->trace();
  if (frame == nullptr || !takes(grad_outputs) || backward_writes_outside(trace)) return {};
  std::optional<GivenTensors> given;
  std::optional<GeneratorStates::Again> again;
  if (states_) {
    given.emplace(*program_, *frame);
    again.emplace(*states_);
  }
  for (std::size_t i = 0; i < grad_outputs.size(); ++i) {
    if (!grad_outputs[i].defined()) continue;
    frame->values[at_slot(trace.grad_outputs[i])] = grad_outputs[i];
  }
  const at::NoGradGuard no_grad;
  Tensors found;
  try {
    program_->backward(*frame, trace.split, trace.tape.calls().size());
    for (const int slot : trace.gradients) {
      found.push_back(slot == kUndefined ? at::Tensor() : frame->values[at_slot(slot)]);
    }
  } catch (const std::exception& error) {
    return concat("the program's backward throws: ", error.what());
  }
  if (again) {
    const GeneratorStates::After after = again->after();
    // The thread's own generators must be back before holds() looks at them.
    again.reset();
    drew_alone_ = drew_alone_ && after.holds();
  }
  return compare(found, gradients, "gradient");
}

}  // namespace cohort::script
