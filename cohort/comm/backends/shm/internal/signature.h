#pragma once

#include <cstdint>
#include <string>

#include "cohort/comm/internal/kernels/kernels.h"

namespace cohort::comm::shm {

enum class CollectiveType : std::uint8_t {
  kRendezvous,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier,
};

/// What a rank calls. It travels with every round, in one word, so that calls that differ between the ranks
/// are an error and not wrong numbers.
struct Signature {
  CollectiveType type = CollectiveType::kBarrier;
  Dtype dtype = Dtype::kBytes;
  Op op = Op::kNone;
  int root = 0;             ///< below 64
  std::uint64_t bytes = 0;  ///< that must be equal on all ranks

  std::uint64_t pack() const;
  static Signature unpack(std::uint64_t word);
  /// "all_reduce of 48 bytes float SUM".
  std::string text() const;
};

}  // namespace cohort::comm::shm
