#include "cohort/models/model.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace cohort::models {
namespace {

thread_local int depth = 0;

}  // namespace

CloneScope::CloneScope() {
  if (depth++ > 0) return;  // a block inside a model
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator_state_ = generator.get_state();
}

CloneScope::~CloneScope() {
  if (--depth > 0) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(generator_state_);
}

bool CloneScope::active() {
  return depth > 0;
}

}  // namespace cohort::models
