#pragma once

#include <optional>
#include <utility>

#include "cohort/launch/peers.h"
#include "tests/support/comes_true.h"

/// Agents that look and give signs often enough for tests.
namespace cohort::launch {

using test::comes_true;

inline PeersOptions quick(int node, int nnodes, std::optional<core::Secret> secret = std::nullopt) {
  using std::chrono::milliseconds;
  return {.node = node,
          .nnodes = nnodes,
          .interval = milliseconds(5),
          .keep_alive_interval = milliseconds(50),
          .keep_alive_max_attempt = 10,
          .secret = std::move(secret)};
}

}  // namespace cohort::launch
