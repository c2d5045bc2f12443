#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/secret.h"

/// Workers, whom to call, and what can be chosen. Include cohort/rpc/agent.h.
namespace cohort::rpc {

struct WorkerInfo {
  std::string name;
  int id = 0;  ///< from 0 on
  bool operator==(const WorkerInfo&) const = default;
};

/// Whom to call, and how long to wait.
struct Target {
  Target(const char* name) : worker(name) {}  // NOLINT: a name is a target
  Target(std::string name) : worker(std::move(name)) {}
  Target(const WorkerInfo& info) : worker(info.name) {}
  Target within(std::chrono::milliseconds time) const {
    Target target = *this;
    target.timeout = time;
    return target;
  }
  std::string worker;
  std::optional<std::chrono::milliseconds> timeout;  ///< else the agent's
};
inline Target to(std::string worker) {
  return Target(std::move(worker));
}

struct AgentOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of a call that has none of its own
  int num_threads = 16;                ///< handlers at a time; those that wait do not count
  std::string listen = "127.0.0.1:0";  ///< where the other workers reach this one
  std::optional<base::Secret> secret = base::Secret::of_process();    ///< of the job; needed beyond loopback
  std::chrono::milliseconds silence = std::chrono::seconds(2);        ///< after which a host is given up
  std::chrono::milliseconds join_timeout = std::chrono::seconds(60);  ///< for all workers to come
};

struct AgentMetrics {
  std::uint64_t calls_made = 0, calls_handled = 0;
  std::size_t calls_pending = 0;     ///< made, and not answered
  std::size_t handlers_running = 0;  ///< or waiting for their turn
  std::uint64_t bytes_sent = 0, bytes_received = 0;
};

}  // namespace cohort::rpc
