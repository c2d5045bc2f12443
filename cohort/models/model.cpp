#include "cohort/models/model.h"

namespace cohort::models {
namespace {

// Each thread copies its own models, so that replicas can be made at the same time.
thread_local int depth = 0;

}  // namespace

CloneScope::CloneScope() {
  if (depth++ > 0) return;  // a block inside a model
  // Only the outermost scope saves the generator: a nested one would copy its state once more for each block.
  generator_.emplace();
  generator_->restore_at_end();
}

CloneScope::~CloneScope() {
  --depth;
}

bool CloneScope::active() {
  return depth > 0;
}

}  // namespace cohort::models
