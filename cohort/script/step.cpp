// A whole training step has one tape: forward and backward are recorded together, and gradients are results.
// The optimizer's step is not recorded. It runs as it is after each replay. Calls are recorded, verified or
// replayed as in function.cpp, but without nodes, since nobody differentiates the loss. Always: update() runs
// once in a call, whichever way the call takes. Surprising: a replay assigns .grad, and the gradients may lie
// in the frame's arena until zero_grad() of the next step drops them. Hooks on parameters would not run, so
// such steps stay eager.
#include "cohort/script/step.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "cohort/base/error.h"
#include "cohort/script/internal/passes/backward.h"
#include "cohort/script/internal/record/cache.h"
#include "cohort/script/internal/record/recorder.h"
#include "cohort/script/internal/record/verify.h"

namespace cohort::script {
namespace {

using base::concat;

bool has_hooks(const at::Tensor& leaf) {
  if (!torch::autograd::impl::hooks(leaf).empty()) return true;
  if (torch::autograd::impl::post_acc_grad_hooks(leaf) != nullptr) return true;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return node != nullptr &&
         (!node->pre_hooks().empty() || !node->post_hooks().empty() || !node->tensor_pre_hooks().empty());
}

}  // namespace

TrainingStep::TrainingStep(Parts parts, ScriptOptions options)
    : parts_(std::move(parts)),
      cache_(std::make_unique<Cache>(options.name() == ScriptOptions().name() ? "step" : options.name(),
                                     options)) {}

TrainingStep::~TrainingStep() = default;

std::string TrainingStep::explain() const {
  return cache_->explain();
}

void TrainingStep::clear() {
  cache_->clear();
}

void TrainingStep::update() {
  if (parts_.before_update) parts_.before_update();
  parts_.update();
}

at::Tensor TrainingStep::run(const Tensors& inputs) {
  parts_.zero_grad();
  const at::Tensor loss = parts_.loss(inputs);
  loss.backward();
  update();
  return loss.detach();
}

at::Tensor TrainingStep::operator()(const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) {
    throw UsageError("script.step", "a training step needs gradients, which are switched off",
                     "the call outside of at::NoGradGuard");
  }
  if (Recording::is_active() || std::ranges::any_of(inputs, has_tangent)) return run(inputs);
  const auto entry = cache_->find(inputs);
  if (entry == nullptr) return run(inputs);
  const auto program = entry->program();
  const bool is_verification = program != nullptr && entry->is_verification_due(inputs);
  if (program != nullptr && !is_verification) return replay(inputs, *program);
  if (entry->has_module_memory(inputs)) return run(inputs);  // a parameter or buffer is an input here
  if (program == nullptr && !entry->start_recording()) return run(inputs);
  std::optional<Verification> verifying;
  if (is_verification) verifying.emplace(program, inputs);
  Trace trace;
  entry->begin(trace, inputs);
  const at::Tensor loss = record(inputs, trace);
  if (is_verification) {
    Tensors gradients;
    for (const at::Tensor& leaf : program->trace().leaves) gradients.push_back(leaf.grad());
    const std::string difference = verifying->difference({loss}, gradients);
    entry->compare(difference, verifying->is_alone(trace.tape));
    entry->verify(std::move(trace));
  } else {
    entry->add_trace(std::move(trace));
  }
  update();
  return loss;
}

at::Tensor TrainingStep::record(const Tensors& inputs, Trace& trace) {
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) trace.tape.mark_unsupported("an input needs a gradient");
  }
  // Gradients must be gone before: one that is there is added to, and the tape did not make it.
  parts_.zero_grad();
  at::Tensor loss;
  {
    const Recording recording(trace.tape);
    loss = parts_.loss(inputs);
  }
  if (std::string reason = unrecordable_within({loss}); !reason.empty())
    trace.tape.mark_unsupported(std::move(reason));
  // The engine runs backward on the device's thread, and a recorder sees its own thread only.
  run_where_backward_runs(loss.device(), [&] {
    const Recording recording(trace.tape);
    loss.backward();
  });
  loss = loss.detach();
  trace.tape.check_versions();
  const int slot = trace.tape.find_result(loss);
  if (slot == kUnknown) trace.tape.mark_unsupported("the loss is a tensor that no operator made");
  trace.outputs.push_back(slot);
  find_gradients(trace);
  trace.split = trace.tape.calls().size();
  return loss;
}

void TrainingStep::find_gradients(Trace& trace) {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const at::Tensor& parameter : parts_.parameters()) {
    known.insert(parameter.unsafeGetTensorImpl());
    if (has_hooks(parameter)) {
      trace.tape.mark_unsupported(
          concat("a parameter ", Layout::of(parameter).str(), " has a hook, which would not run"));
    }
    if (!parameter.grad().defined()) continue;
    const int slot = trace.tape.find_result(parameter.grad());
    if (slot < 0 || trace.tape.values()[at_slot(slot)].source != Source::kMade) {
      trace.tape.mark_unsupported("a gradient was there before the step, or is no strided tensor");
    }
    trace.leaves.push_back(parameter);
    trace.gradients.push_back(slot);
  }
  // The backward that was recorded also reached leaves that are not the optimizer's.
  for (const Value& value : trace.tape.values()) {
    const at::Tensor& tensor = value.tensor;
    if (value.source != Source::kCaptured || !tensor.requires_grad()) continue;
    if (known.count(tensor.unsafeGetTensorImpl()) == 0 && tensor.is_leaf() && tensor.grad().defined()) {
      trace.tape.mark_unsupported(
          concat("a parameter ", value.layout.str(),
                 " gets a gradient and is not the optimizer's. Try: requires_grad_(false)"));
    }
  }
}

at::Tensor TrainingStep::replay(const Tensors& inputs, const Program& program) {
  const Trace& trace = program.trace();
  // A hook may have been added since the recording.
  if (std::any_of(trace.leaves.begin(), trace.leaves.end(), has_hooks)) return run(inputs);
  // First: gradients of the last step hold the arena, and a held arena is not used again.
  parts_.zero_grad();
  auto frame = program.borrow(inputs);
  program.forward(*frame);
  program.bump_versions(*frame, Phase::kForward);
  at::Tensor loss = frame->values[at_slot(trace.outputs.front())];
  for (std::size_t i = 0; i < trace.leaves.size(); ++i) {
    trace.leaves[i].mutable_grad() = frame->values[at_slot(trace.gradients[i])];
  }
  program.give_back(std::move(frame));
  update();
  return loss;
}

}  // namespace cohort::script
