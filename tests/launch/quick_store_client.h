#pragma once

#include <optional>
#include <utility>

#include "cohort/launch/internal/agent_store_client.h"
#include "tests/support/comes_true.h"

/// Agents that look and give signs often enough for tests. Of three threads on two busy cores one may stand
/// still for a good part of a second while the others continue.
namespace cohort::launch {

using test::comes_true;

/// They are patient for 2 s.
inline AgentStoreClientOptions quick(int node, int nnodes,
                                     std::optional<base::Secret> secret = std::nullopt) {
  using std::chrono::milliseconds;
  return {.node = node,
          .nnodes = nnodes,
          .interval = milliseconds(5),
          .keep_alive_interval = milliseconds(50),
          .keep_alive_max_attempt = 40,
          .secret = std::move(secret)};
}

/// For 0.5 s: where one is to be lost, and nobody else can be.
inline AgentStoreClientOptions hasty(int node, int nnodes,
                                     std::optional<base::Secret> secret = std::nullopt) {
  AgentStoreClientOptions options = quick(node, nnodes, std::move(secret));
  options.keep_alive_max_attempt = 10;
  return options;
}

}  // namespace cohort::launch
