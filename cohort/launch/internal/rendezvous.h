#pragma once

#include <optional>
#include <string>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/agent_store_client.h"
#include "cohort/launch/internal/signal_queue.h"
#include "cohort/launch/internal/worker_group.h"
#include "cohort/launch/run_options.h"

/// How the agents of several nodes find each other. No LibTorch. Not for users of the library.
namespace cohort::launch {

/// Returns which ranks this node has, once all nodes have come and agree; or nothing when a signal came,
/// which `signal` then holds. `reached` is where this node has found node 0. Throws: RendezvousError naming
/// the nodes that did not come, or what they disagree on.
std::optional<WorkerGroupSpec> join_rendezvous(const RunOptions& options, AgentStoreClient& store_client,
                                               SignalQueue& signals, const std::string& reached,
                                               base::Deadline deadline, int& signal);

}  // namespace cohort::launch
