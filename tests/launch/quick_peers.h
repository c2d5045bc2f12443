#pragma once

#include <poll.h>

#include <functional>
#include <optional>
#include <utility>

#include "cohort/launch/peers.h"

/// Agents that look and give signs often enough for tests.
namespace cohort::launch {

inline bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) ::poll(nullptr, 0, 10);
  return condition();
}

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
