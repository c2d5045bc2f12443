#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "cohort/comm/call_types.h"
#include "cohort/comm/group.h"

/// The group of all ranks of a job.
///
///     auto group = comm::init_process_group();      // from torchrun, Slurm, mpirun, or alone
namespace cohort::comm {

/// How this process joins its job.
struct InitOptions {
  /// env://, tcp://host:port (an IPv6 address in brackets) or file:///path.
  std::string init_method = "env://";
  /// One of backend_names(), or auto: nccl where there is a GPU and NCCL, shm where the launcher says that
  /// all ranks are on this host, else gloo; rank 0 logs which and why.
  std::string backend = "auto";
  /// With tcp:// and file://; otherwise, and by default, the environment says.
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  /// For the rendezvous, and for each collective that names no other.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Which calls are compared between the ranks; subgroups inherit it.
  ConsistencyCheck check_consistency = ConsistencyCheck::kFirst;
};

/// Meets the other ranks of the job and returns the group of all. Collective over the job.
/// Throws: RendezvousError naming the ranks that did not come, the address that could not be reached or
/// taken, or what the ranks disagree on; UsageError for an unknown backend or method.
Group init_process_group(const InitOptions& options = {});

}  // namespace cohort::comm
