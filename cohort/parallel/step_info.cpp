#include "cohort/parallel/step_info.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "cohort/base/error.h"

namespace cohort::parallel {

void check_weight(const StepInfo& info) {
  if (!std::isfinite(info.weight) || info.weight < 0) {
    throw UsageError("parallel.average", base::concat("weight is ", info.weight, ", expected 0 or more"));
  }
}

// [weight of each rank | 1 where it is not finite | the caller's]
at::Tensor make_step_header(const comm::Group& group, const StepInfo& info, std::int64_t more) {
  check_weight(info);
  // Each of the step's places is written by one rank and is 0 on the others, so its sum is exact.
  at::Tensor header = at::zeros({2 * group.size() + more}, at::kDouble);
  auto* const words = header.mutable_data_ptr<double>();
  words[group.rank()] = info.weight;
  words[group.size() + group.rank()] = info.finite ? 0 : 1;
  return header;
}

AverageReport read_step_header(const at::Tensor& header, int num_ranks) {
  const auto* const words = header.const_data_ptr<double>();
  AverageReport report;
  for (int r = 0; r < num_ranks; ++r) {
    report.weight += words[r];
    if (words[num_ranks + r] != 0 && !report.bad_rank) report.bad_rank = r;
  }
  return report;
}

}  // namespace cohort::parallel
