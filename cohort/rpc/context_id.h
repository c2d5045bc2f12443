#pragma once

#include <compare>
#include <cstdint>

#include "cohort/rpc/codec.h"

namespace cohort::rpc::dist_autograd {

/// A context of distributed autograd: the worker that began it, and its number there. Travels as an argument.
struct ContextId {
  std::int32_t creator = 0;  ///< id of that worker
  std::uint64_t number = 0;
  auto operator<=>(const ContextId&) const = default;
};
COHORT_NESTED(ContextId, creator, number)

}  // namespace cohort::rpc::dist_autograd
