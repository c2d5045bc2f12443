#pragma once

#include <map>
#include <memory>
#include <string>

#include "cohort/base/key_value_store.h"
#include "cohort/net/peer.h"
#include "cohort/rpc/internal/agent/agent_core.h"

namespace cohort::rpc {

/// Makes the node of an agent, which calls `handler` from then on.
void make_node(AgentCore& core, int workers_of_host, const std::shared_ptr<net::Handler>& handler);

/// Listens for workers of other hosts too. Returns the address for them.
std::string listen_beyond_host(AgentCore& core);

/// Logs which functions `worker` has with other signatures than this program: a call of one is an error.
void warn_of_differences(const AgentCore& core, const std::string& worker,
                         const std::map<std::string, std::string>& signatures);

/// Fills the table of workers, and connects to all of them. Makes the node, which calls `handler` from then
/// on. Blocking: until all have come. Throws: RendezvousError that names who is missing; UsageError for two
/// workers of one name.
void join_workers(AgentCore& core, int world_size, base::KeyValueStore& store,
                  const std::shared_ptr<net::Handler>& handler);

}  // namespace cohort::rpc
