#pragma once

#include "cohort/launch/run_options.h"

namespace cohort::launch {

/// Runs `options.command` in nproc_per_node ranks on this node, under torchrun's environment, and returns the
/// job's exit status: 0, else that of the rank that failed first, 128 + N when signal N ended it. After a
/// signal that this process passed on: the first status of a rank that is not 0. With several nodes each has
/// its agent, a call of this function with its node_rank; all return the same status. Blocking: until every
/// rank of this node is gone and the other nodes know. Threads: from the thread that outlives the ranks, as a
/// rule main's; one job at a time in a process, whose signal handlers it takes meanwhile. Writes what ranks
/// print to this process's stdout and stderr, and a report of a failure to the log. Throws: UsageError;
/// RendezvousError when nodes do not come, naming them; PeerError when another node's agent is gone;
/// SystemError when a process, a file or the port cannot be had.
int run_job(const RunOptions& options);

}  // namespace cohort::launch
