#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/store_adapter.h"

/// What a backend's folder offers to make_group. Not installed as an interface: users name a backend.
namespace cohort::comm {

struct BackendOptions {
  c10::intrusive_ptr<c10d::Store> store;          ///< the group asks it too, on the same connection
  std::shared_ptr<StoreConnections> connections;  ///< others, to what is below `prefix`
  std::string prefix;                             ///< of the keys of `store`
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};               ///< of its calls
  base::Deadline deadline = base::Deadline::never();  ///< of making it
  std::string reach;                                  ///< host that connections must reach; empty: any
};

/// A backend that cannot end one call. Without connections all of them end at once, with `words`, and so do
/// the other ranks' ends of them. Threads: any; the first counts.
class ClosesConnections {
 public:
  virtual ~ClosesConnections() = default;
  virtual void close(const std::string& words) = 0;
};

struct BackendInstance {
  c10::intrusive_ptr<c10d::Backend> backend;
  c10d::ProcessGroup::BackendType type = c10d::ProcessGroup::BackendType::CUSTOM;
  /// False: the other ranks are imagined, and nothing may wait for them.
  bool is_distributed = true;
  /// True: an element's sum goes in the order of ranks, wherever in the tensor it lies.
  bool deterministic_rank_order = false;
  /// That its tensors are on. A group over a backend for GPUs has gloo beside it, for tensors on the CPU.
  c10::DeviceType device = c10::kCPU;
};

BackendInstance make_gloo(const BackendOptions& options);
BackendInstance make_shm(const BackendOptions& options);
BackendInstance make_fake(const BackendOptions& options);
/// Throw UsageError saying why, where the backend is not in this build.
BackendInstance make_nccl(const BackendOptions& options);
BackendInstance make_mpi(const BackendOptions& options);

/// Why the backend is not in this build; empty when it is.
std::string nccl_absent();
std::string mpi_absent();

/// Why `auto` is which backend.
struct BackendChoice {
  std::string backend;
  std::string reason;
};

/// `cuda`: whether a CUDA device can be used. `one_host`: whether all ranks share memory. `device_reason`:
/// why a GPU is used, or why not. `nccl_absent`: as above.
BackendChoice choose_backend(bool cuda, bool one_host, const std::string& device_reason,
                             const std::string& nccl_absent);

}  // namespace cohort::comm
