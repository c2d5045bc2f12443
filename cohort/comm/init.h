#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "cohort/comm/call_types.h"
#include "cohort/comm/group.h"

/// The group of all ranks of a job.
///
///     auto group = comm::init_process_group();      // from torchrun, Slurm, mpirun, or alone
namespace cohort::comm {

class GroupOwner;

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

/// How this process meets others over a store that they have already.
struct StoreInitOptions {
  c10::intrusive_ptr<c10d::Store> store = {};
  std::string where = {};  ///< where the store is, for messages
  int rank = 0, size = 1;
  std::string name = "world";    ///< of the group
  std::string title = {};        ///< of its rows on the timeline; empty: its name
  std::string backend = "auto";  ///< as in InitOptions
  std::string reach = {};  ///< a host that connections must reach, where ranks are on several; empty: any
  /// For the rendezvous, and for each collective that names no other.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  ConsistencyCheck check_consistency = ConsistencyCheck::kFirst;
  /// Whose end is the group's (group_owner.h), which is then one of tensors on the CPU; null: none.
  std::shared_ptr<GroupOwner> owner = nullptr;
};

/// Meets the other ranks of the job and returns the group of all. Collective over the job.
/// Throws: RendezvousError naming the ranks that did not come, the address that could not be reached or
/// taken, or what the ranks disagree on; UsageError for an unknown backend or method.
Group init_process_group(const InitOptions& options = {});
/// The same over a store that no other group uses. Collective over its ranks. A process that keeps the store
/// must outlast the groups of all ranks.
Group join_process_group(const StoreInitOptions& options);

}  // namespace cohort::comm
