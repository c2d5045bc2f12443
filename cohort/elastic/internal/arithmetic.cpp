#include "cohort/elastic/internal/arithmetic.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <cstdlib>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::elastic {

using base::concat;

Arithmetic Arithmetic::of_thread() {
  return {.threads = at::get_num_threads(), .instructions = at::get_cpu_capability()};
}

std::string Arithmetic::to_text() const {
  return concat(threads, " ", instructions);
}

Arithmetic Arithmetic::parse(const std::string& text) {
  const std::size_t space = text.find(' ');
  const int threads = std::atoi(text.c_str());
  if (space == std::string::npos || threads < 1) {
    throw CommError("elastic.read", "a process did not say how it computes",
                    "the same version of Cohort on all hosts");
  }
  return {.threads = threads, .instructions = text.substr(space + 1)};
}

void compute_as(const Arithmetic& other, const std::string& process) {
  const Arithmetic own = Arithmetic::of_thread();
  if (own.instructions != other.instructions) {
    throw UsageError("elastic.session",
                     concat("this process computes with ", own.instructions, " instructions, and ", process,
                            " with ", other.instructions, ": the bits of a step would differ"),
                     "hosts with the same processors, or ATEN_CPU_CAPABILITY=default on all of them");
  }
  if (own.threads == other.threads) return;
  base::log_warning(concat("this process computes with ", other.threads, " threads, as ", process,
                           ", and not ", own.threads,
                           ": set OMP_NUM_THREADS, or at::set_num_threads(), to one number on all hosts"));
  at::set_num_threads(other.threads);
}

}  // namespace cohort::elastic
