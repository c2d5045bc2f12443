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
  bool has_peers = true;  ///< as the backend says
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;

  std::atomic<std::int64_t> calls{0};      ///< collectives begun
  std::atomic<std::int64_t> subgroups{0};  ///< made of this group
  std::atomic<std::int64_t> barriers{0};

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

/// As make_group, with the name and the ranks' numbers in the job.
std::shared_ptr<Group::State> make_state(c10::intrusive_ptr<c10d::Store> store, const std::string& name,
                                         std::vector<int> job_ranks, int rank, const std::string& backend,
                                         std::chrono::milliseconds timeout, const std::string& reach);

}  // namespace cohort::comm
