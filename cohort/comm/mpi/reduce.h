#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

/// Sums and their like of numbers that came from several ranks. MPI only moves bytes; what is added up is
/// added up here, so that the order, and with it every bit, is ours.
namespace cohort::comm::mpi {

using ReduceOp = c10d::ReduceOp::RedOpType;

/// Throws: c10::Error naming type and operation where there is no code for them.
void check_reducible(at::ScalarType dtype, ReduceOp op);

/// What is reduced: `ranks` parts of `numel` numbers each, one after the other.
struct Parts {
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = c10d::ReduceOp::SUM;
  const std::byte* data = nullptr;
  std::int64_t ranks = 1;
  std::int64_t numel = 0;
};

/// Writes numel numbers, each reduced over the parts in the order of ranks. Half and BFloat16 are added up in
/// float and rounded once, whole numbers in 64 bits; AVG divides the sum, for whole numbers towards zero.
/// `out` may be the first part. Bool: SUM and MAX are "or", PRODUCT and MIN "and".
void reduce_parts(const Parts& parts, std::byte* out);

}  // namespace cohort::comm::mpi
