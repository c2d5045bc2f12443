#include "cohort/models/model.h"

namespace cohort::models {
namespace {

thread_local int depth = 0;

}  // namespace

CloneScope::CloneScope() {
  if (depth++ > 0) return;  // a block inside a model
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
