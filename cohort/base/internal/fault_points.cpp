#include "cohort/base/internal/fault_points.h"

#include <utility>

namespace cohort::base {
namespace {

std::function<void(const char*)>& fault_hook() {
  static std::function<void(const char*)> hook;
  return hook;
}

}  // namespace

void set_fault_hook(std::function<void(const char* point)> hook) {
  fault_hook() = std::move(hook);
}

void reach_fault_point(const char* point) {
  if (fault_hook()) fault_hook()(point);
}

}  // namespace cohort::base
