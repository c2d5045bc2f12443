#include "cohort/parallel/gradient_sync_base.h"

#include "cohort/parallel/broadcast.h"

namespace cohort::parallel {

AverageReport GradientSync::average(const optim::Optimizer& /*optimizer*/, double samples, bool finite) {
  AverageReport report;
  // One process: its gradients are the mean already.
  report.weight = samples;
  if (!finite) report.bad_rank = 0;
  return report;
}

void GradientSync::step(optim::Optimizer& optimizer, const optim::NonFinite& found) {
  optimizer.step_unless(found);
}

// Before the first step, so that every rank starts from rank 0's values.
void ReplicatedSync::begin(const TaskParts& parts) {
  for (const NamedModule& entry : parts.modules) broadcast_module(group_, *entry.module);
}

void ReplicatedSync::synchronize_buffers(const TaskParts& parts) {
  for (const NamedModule& entry : parts.modules) broadcast_buffers(group_, *entry.module);
}

}  // namespace cohort::parallel
