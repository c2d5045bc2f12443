#include "cohort/core/version.h"

namespace cohort::core {

std::string_view version() {
  return COHORT_VERSION;
}

}  // namespace cohort::core
