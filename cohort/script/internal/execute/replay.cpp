// Each result gets the handle that the function's own result had: the value itself, a tensor with its memory,
// or a view of an input or a captured tensor.
#include "cohort/script/internal/execute/replay.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "cohort/autograd/output_aliases.h"

namespace cohort::script {
namespace {

Tensors outputs_of(const Program& program, const Frame& frame) {
  const Trace& trace = program.trace();
  Tensors results;
  results.reserve(trace.outputs.size());
  for (std::size_t i = 0; i < trace.outputs.size(); ++i) {
    const int slot = trace.outputs[i];
    if (slot == kUndefined) {
      results.emplace_back();
      continue;
    }
    const at::Tensor& value = frame.values[at_slot(slot)];
    const Handle& handle = trace.handles[i];
    if (trace.tape.values()[at_slot(slot)].source == Source::kConstant) {
      // The user may write to a result, and the program keeps its constant.
      results.push_back(value.clone());
    } else if (handle.kind == Handle::AliasType::kItself) {
      results.push_back(value);
    } else if (handle.kind == Handle::AliasType::kDetached) {
      results.push_back(value.detach());
    } else {
      const at::Tensor& base = frame.values[at_slot(handle.base)];
      const at::AutoGradMode mode(at::GradMode::is_enabled() && !base.requires_grad());
      results.push_back(autograd::view_like(base, value));
    }
  }
  return results;
}

}  // namespace

Tensors replay(std::span<const at::Tensor> inputs, const std::shared_ptr<const Program>& program,
               Rerun rerun) {
  const Trace& trace = program->trace();
  auto frame = program->borrow(inputs);
  program->forward(*frame);
  // Before attach_replay() notes versions: forward's own writes are no change since forward.
  program->bump_versions(*frame, Phase::kForward);
  Tensors results = outputs_of(*program, *frame);
  if (trace.has_backward) attach_replay(program, inputs, results, *frame, std::move(rerun));
  trace.views.restore(results);
  program->give_back(std::move(frame));
  return results;
}

}  // namespace cohort::script
