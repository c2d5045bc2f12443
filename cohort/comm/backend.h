#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/registry.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/group_owner.h"
#include "cohort/comm/store_adapter.h"

/// Communication backends by name: Cohort's, and those that a program or a library given to `--load`
/// registers.
///
///     COHORT_REGISTER_BACKEND("mine", {.make = [](const cohort::comm::BackendOptions& options) {
///       return cohort::comm::BackendInstance{
///           .backend = c10::make_intrusive<MyBackend>(options.store, options.rank, options.size)};
///     }});
namespace cohort::comm {

/// What a backend is made from.
struct BackendOptions {
  c10::intrusive_ptr<c10d::Store> store;          ///< the group asks it too, on the same connection
  std::shared_ptr<StoreConnections> connections;  ///< others, to what is below `prefix`
  std::string prefix;                             ///< of the keys of `store`
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};               ///< of its calls
  base::Deadline deadline = base::Deadline::never();  ///< of making it
  std::string reach;                                  ///< host that connections must reach; empty: any
  std::shared_ptr<GroupOwner> owner = nullptr;        ///< with whose end the making ends; null: none
};

/// A backend that cannot end one call. Without connections all of them end at once, with `words`, and so do
/// the other ranks' ends of them. Threads: any; the first counts.
class ClosesConnections {
 public:
  virtual ~ClosesConnections() = default;
  /// Ends all connections now; `words` say why, and stand in the errors of the calls that end so.
  virtual void close(const std::string& words) = 0;
};

/// A backend that was made, and what it can do: Group adapts its calls to that.
struct BackendInstance {
  c10::intrusive_ptr<c10d::Backend> backend;
  /// The type that c10d knows the backend by.
  c10d::ProcessGroup::BackendType type = c10d::ProcessGroup::BackendType::CUSTOM;
  /// False: the other ranks are imagined, and nothing may wait for them.
  bool is_distributed = true;
  /// True: an element's sum goes in the order of ranks, wherever in the tensor it lies.
  bool deterministic_rank_order = false;
  /// Why it has no tags of messages, for the error of send() and recv(): "NCCL has no tags". Empty: it has.
  std::string no_message_tags = "";
  /// False: send() and recv() of tensors on the CPU never write to a socket on the calling thread, or do it
  /// with MSG_NOSIGNAL. True costs two system calls per message, and a lost peer cannot end the process.
  bool may_raise_sigpipe = true;
  /// True: all its groups of a process share one queue. A call, or the making of a group, waits for the calls
  /// before it.
  bool shares_queue = false;
  /// That its tensors are on. A group over a backend for GPUs has another one beside it, for tensors on the
  /// CPU: the one that `auto` chooses where ranks are on several hosts.
  c10::DeviceType device = c10::kCPU;
};

/// What is known when `auto` chooses.
struct BackendSituation {
  bool cuda = false;          ///< a CUDA device can be used
  bool one_host = false;      ///< all ranks share memory
  std::string device_reason;  ///< why a GPU is used, or why not
  bool ends_calls = false;    ///< as of BackendType: only those that have it
};

/// How well a backend suits a situation.
struct BackendFit {
  int preference = 0;  ///< the largest is chosen; 0: never by `auto`
  std::string reason;  ///< why it fits, for the log of the choice
};

/// A backend.
struct BackendType {
  /// Makes the backend of one rank of one group. Collective over the group's ranks.
  std::function<BackendInstance(const BackendOptions&)> make;
  /// Why it cannot be used in this build or on this machine; empty: it can. Null: always.
  std::function<std::string()> absent = nullptr;
  /// Null: only by name.
  std::function<BackendFit(const BackendSituation&)> fit = nullptr;
  /// True: it carries nothing between ranks. `cohort doctor` does not list it.
  bool is_for_tests = false;
  /// As that of BackendInstance.
  c10::DeviceType device = c10::kCPU;
  /// Calls under way end within milliseconds of abort(), or of ClosesConnections::close(). Only such backends
  /// have groups that end with an owner (group_owner.h), as in elastic runs.
  bool ends_calls = false;
};

/// Returns the backend of that name. Throws: UsageError for an unknown name, naming the nearest and all, or
/// for one that two libraries registered.
BackendType backend_type(const std::string& name);

/// Throws: UsageError for a name that is neither `auto` nor a backend's, or one that two libraries
/// registered.
void check_backend_name(const std::string& name);

/// Makes `type` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_backend(const std::string& name, BackendType type);

/// What COHORT_REGISTER_BACKEND calls while a library loads: a name that is taken stays with the first, and
/// making a group over it throws, naming both places.
bool register_backend_at_load(const char* name, BackendType type, const char* file, int line) noexcept;

}  // namespace cohort::comm

/// Registers a backend where it is written, at namespace scope.
#define COHORT_REGISTER_BACKEND(name, ...) \
  COHORT_REGISTER_AT_LOAD(comm::register_backend_at_load, name, __VA_ARGS__)
