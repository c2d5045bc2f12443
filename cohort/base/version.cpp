#include "cohort/base/version.h"

namespace cohort::base {

std::string_view version() {
  return COHORT_VERSION;
}

}  // namespace cohort::base
