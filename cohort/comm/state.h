#pragma once

#include <atomic>
#include <mutex>

#include "cohort/comm/group.h"
#include "cohort/core/deadline.h"

/// What the handles of a group share. Internal to this module.
namespace cohort::comm {

struct Group::State {
  std::string name;
  std::string backend;
  int rank = 0;
  int size = 1;
  std::vector<int> job_ranks;
  std::chrono::milliseconds timeout{0};
  std::string reach;
  Check check = Check::kFirst;
  bool has_peers = true, takes_cpu = true;  ///< as the backend says
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;

  std::atomic<std::int64_t> calls{0};      ///< collectives begun
  std::atomic<std::int64_t> messages{0};   ///< send and recv begun
  std::atomic<std::int64_t> steps{0};      ///< step_done() calls
  std::atomic<std::int64_t> compared{0};   ///< comparisons over the store
  std::atomic<std::int64_t> subgroups{0};  ///< made of this group
  std::atomic<std::int64_t> barriers{0};

  /// Whether collective `number` is compared; the same on every rank as long as all call the same.
  bool checks(std::int64_t number) const;
  /// Marks the group as broken by `what`, once; others who ask the store learn of it.
  void mark_broken(const std::string& what);
  /// Throws CommError with the first failure, if there was one.
  void check_usable() const;
  /// Ranks that have not failed too within a second of this one: they are dead, or stuck. Text for a message,
  /// may be empty.
  std::string silent_ranks() const;

 private:
  mutable std::mutex mutex_;
  std::string broken_;
};

/// Throws `error` as what it is: TimeoutError, PeerError or CommError, with `where` and the backend's words.
[[noreturn]] void throw_as_ours(const std::exception& error, const std::string& where,
                                const std::string& what);

/// Waits until each of `size` ranks has set `prefix`/rank; returns those that have not when the deadline
/// passes, or the store is gone (then `error` says how).
std::vector<int> missing_ranks(c10d::Store& store, const std::string& prefix, int size,
                               core::Deadline deadline, std::string& error);

/// "1, 2 and 5".
std::string list_ranks(const std::vector<int>& ranks);

struct StateOptions {
  c10::intrusive_ptr<c10d::Store> store;
  std::string name = "world";
  std::vector<int> job_ranks;  ///< of each rank of the group
  int rank = 0;
  std::string backend;
  std::chrono::milliseconds timeout{0};
  std::string reach = {};
  Check check = Check::kFirst;
};

/// As make_group.
std::shared_ptr<Group::State> make_state(StateOptions options);

/// 0 to size - 1.
std::vector<int> all_ranks(int size);

}  // namespace cohort::comm
