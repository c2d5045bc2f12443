#pragma once

#include <algorithm>
#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "cohort/comm/group.h"

/// LibTorch's own reducer, beside which ours is measured.
namespace cohort::bench {

/// With the bucket sizes of PyTorch's DistributedDataParallel.
inline std::shared_ptr<c10d::Reducer> make_c10d(const std::vector<at::Tensor>& parameters,
                                                const comm::Group& group) {
  constexpr std::int64_t kFirst = 1 << 20, kCap = 25 << 20;
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {kFirst, kCap});
  std::reverse(buckets.begin(), buckets.end());
  return std::make_shared<c10d::Reducer>(
      parameters, buckets, group.process_group(), std::vector<bool>(parameters.size(), false), kCap, false,
      true, std::unordered_map<size_t, std::string>(), kFirst, false, false, std::vector<std::int64_t>());
}

/// What PyTorch's wrapper does between forward and backward.
inline void prepare(c10d::Reducer& reducer) {
  reducer.prepare_for_forward();
  if (reducer.should_rebuild_buckets()) reducer.rebuild_buckets();
  reducer.prepare_for_backward({});
}

}  // namespace cohort::bench
