#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/comm/call_types.h"
#include "cohort/comm/group_owner.h"
#include "cohort/comm/internal/error_cause.h"
#include "cohort/comm/internal/flight_recorder.h"
#include "cohort/comm/internal/hang_detector.h"
#include "cohort/comm/store_adapter.h"

/// What the handles of a group share. Internal to this module.
namespace cohort::comm {

struct GroupState;

/// The groups of one rank that descend from one: what a report is about.
class GroupRegistry {
 public:
  GroupRegistry(int rank_of_job, int size_of_job) : rank(rank_of_job), size(size_of_job) {}
  const int rank;
  const int size;

  void add(const std::shared_ptr<GroupState>& group);
  /// Those that live, in the order in which they were made.
  std::vector<std::shared_ptr<GroupState>> groups() const;
  /// False when there is one already; null takes it away.
  bool set_hang_detector(const std::shared_ptr<HangDetector>& hang_detector);
  std::shared_ptr<HangDetector> hang_detector() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<GroupState>> groups_;
  std::weak_ptr<HangDetector> hang_detector_;
};

/// Of this process, those that live.
std::vector<std::shared_ptr<GroupRegistry>> all_group_registries();

struct GroupState : std::enable_shared_from_this<GroupState> {
  std::string name;
  std::string title;  ///< of its rows on the timeline, which groups that follow each other may share
  std::string backend;
  int rank = 0;
  int size = 1;
  std::vector<int> job_ranks;
  std::chrono::milliseconds timeout{0};
  std::string reach;
  ConsistencyCheck check_consistency = ConsistencyCheck::kFirst;
  bool is_kept_by_rank = true;            ///< the store, by the job's rank 0, with whose end it goes
  bool is_distributed = true;             ///< as the backend says
  bool deterministic_rank_order = false;  ///< as it says too
  std::string no_message_tags = "";       ///< why, as it says
  bool may_raise_sigpipe = true;          ///< as the backend of tensors on the CPU says
  bool shares_queue = false;              ///< with other groups of its backend, as it says
  c10::DeviceType device = c10::kCPU;     ///< that its tensors are on
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;                             ///< of its keys, before those that the store has
  std::shared_ptr<StoreConnections> connections;  ///< to what is below the prefix, for requests that wait
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<GroupOwner> owner;  ///< null: none
  bool shares_time = false;           ///< what the caller gives to calls is left of the group's own time

  std::atomic<int> calls_under_way{0};        ///< handles of calls that somebody holds
  std::atomic<std::int64_t> calls{0};         ///< collectives begun
  std::atomic<bool> has_begun_on_gpu{false};  ///< a collective of tensors on a GPU was handed over
  std::atomic<std::int64_t> messages{0};      ///< send and recv begun
  std::atomic<std::int64_t> steps{0};         ///< step_done() calls
  std::atomic<std::int64_t> compared{0};      ///< comparisons over the store
  std::atomic<std::int64_t> subgroups{0};     ///< made of this group
  std::atomic<std::int64_t> barriers{0};
  std::atomic<std::int64_t> positions{0};  ///< collectives and barriers, as the flight record counts them
  FlightRecord flight;
  std::atomic<std::int64_t> traces{0};  ///< write_trace() calls
  std::shared_ptr<GroupRegistry> registry;

  /// Whether collective `number` is compared; the same on every rank as long as all call the same.
  bool checks(std::int64_t number) const;
  /// Has the group's thread run `task` after all that it was given before.
  base::Future<void> enqueue(std::function<void()> task);
  /// Whether the group's thread has nothing to do, so that a call may be begun by its caller.
  bool is_queue_empty() const { return queued_->load(std::memory_order_acquire) == 0; }
  /// Returns once the calls that were made before have begun. Throws: TimeoutError, naming `for_whom` they
  /// are waited for.
  void wait_until_begun(base::Deadline deadline, const std::string& for_whom) const;
  /// From now on calls are begun by their callers, after those that have been made: others, who have the
  /// process group, begin calls between them. Its owner keeps the group until it ends. Blocks until those
  /// have begun, at most the group's timeout. Throws: what the owner throws, where it has ended.
  void share_with_c10d();
  bool is_shared_with_c10d() const { return is_shared_with_c10d_.load(); }
  /// Counts a call that is over. `call` is a literal.
  void count(const char* call, const CallCounters& added);
  std::map<std::string, CallCounters> counters() const;
  /// A row of the timeline that no other call of this group is on, until it is given back.
  int take_row();
  void give_row(int row);
  /// "world", "world (2)": the name of a row.
  std::string row_name(int row) const;
  /// Marks the group as broken by `what`, once; others who ask the store learn of it, if it answers by then.
  void mark_broken(const std::string& what, base::Deadline until) { mark_broken(what, until, false); }
  /// The same: `error` is what befell the call `what`.
  void mark_broken(const std::string& what, const std::exception& error, base::Deadline until);
  /// Throws CommError with the first failure, if there was one; what its owner throws, where that has ended.
  /// Waits for the news of that as throw_if_ending(), where the failure may come of it.
  void check_usable();
  /// Throws: what its owner throws, where that has ended.
  void throw_if_ended() const;
  /// The same for a call that begins on this thread. Throws: UsageError where the owner allows none, too.
  void check_owner() const;
  /// A call has failed. Throws: the same, also where the owner ends now, if `error` may come of its end. The
  /// first such call waits for that, and those that fail meanwhile wait with it. Later ones do not wait.
  void throw_if_ending(const std::exception& error);
  /// While it exists a call is under way whose time is the group's own.
  class OwnTime {
   public:
    OwnTime(GroupState& group, base::Deadline deadline);
    ~OwnTime();
    OwnTime(const OwnTime&) = delete;
    OwnTime& operator=(const OwnTime&) = delete;

   private:
    GroupState& group_;
    std::list<base::Deadline>::iterator place_;
  };
  /// The call `where` has waited for these ranks of the group, up to `deadline` or that of another call under
  /// way, which ended both. Throws: where the group's own time is over, what the owner makes of that.
  void give_up(const std::vector<int>& ranks, base::Deadline deadline, const std::string& where) const;
  /// Throws: UsageError where the backend has no tensors of this kind of device.
  void check_carries(c10::Device device) const;
  struct Silence {
    std::vector<int> ranks;  ///< may be empty
    std::string text;        ///< for a message, may be empty
  };
  /// Ranks that have not failed too when the deadline passes: they are dead, or stuck. After mark_broken().
  /// Only the first call waits.
  const Silence& find_silent_ranks(base::Deadline deadline);
  enum class Ends { kAll, kOfConnections };  ///< the latter: where all calls end with their connections
  /// Ends the calls that continue in the backend on the CPU, where it can, as `cause` befell one of them;
  /// returns whether what they still do waits for no other rank.
  bool end_calls(ErrorCause cause, Ends ends = Ends::kAll) const;
  /// A call has failed: marks the group as broken, and throws as throw_translated(), naming the silent ranks.
  /// `own_time`: its deadline, where that is the group's own.
  [[noreturn]] void fail(const std::exception& error, const std::string& what, base::Deadline until,
                         std::optional<base::Deadline> own_time);
  /// As below, and together with the first call that failed.
  base::Deadline end_of_failure(base::Deadline deadline) const;

 private:
  void mark_broken(const std::string& what, base::Deadline until, bool may_be_end);
  void await_end();

  mutable std::mutex mutex_;
  std::string broken_;
  bool may_be_end_ = false;  // of the owner, that has broken it; set with broken_
  base::Deadline failure_end_ = base::Deadline::never();  // of the first one; set with broken_
  std::once_flag silence_asked_;
  Silence silence_;
  std::once_flag end_awaited_;
  std::exception_ptr end_;                   // that the owner told of then; null: none
  std::list<base::Deadline> own_deadlines_;  // of calls under way
  std::map<std::string, CallCounters, std::less<>> counters_;
  std::vector<bool> rows_;
  // The tasks share it: the last one may be what holds the group, which goes within it.
  const std::shared_ptr<std::atomic<int>> queued_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<bool> is_shared_with_c10d_{false};
  std::unique_ptr<base::SerialQueue> thread_;  // made when it is needed; the first to go
};

/// Throws `error` as what it is: UsageError, TimeoutError, PeerError or CommError, with `where` and the
/// backend's words.
[[noreturn]] void throw_translated(const std::exception& error, const std::string& where,
                                   const std::string& what);

/// After a deadline: for the backend to end, and to ask the others.
inline constexpr std::chrono::milliseconds kLateTime(350);

/// Until when a call with that deadline, which has failed now, is to have thrown: kLateTime after the
/// deadline, or a second after the failure, which others may notice later. Calls that are waited for one
/// after the other end together, as it does not count from now.
base::Deadline end_of_failure(base::Deadline deadline);

/// Where its ranks leave words.
StoreAdapter store_adapter_of(const GroupState& state);

/// As base::all_gather_words; where the store is gone the error says so.
base::Words gather_words(StoreAdapter kv_store, const std::string& key, int rank, int size,
                         const std::string& word, base::Deadline deadline);

/// Each rank calls it that needs nothing more of `key` in the store. Where the job's rank 0 keeps the store
/// and is in the group, it waits for the others, some seconds and up to the deadline: it may end next.
void leave_key(GroupState& state, const std::string& key, base::Deadline deadline);

struct StateOptions {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> waits = {};  ///< another connection to it, if there is one
  /// Of the group that it is made of, whose prefix stands before the store's; null: of its own.
  std::shared_ptr<StoreConnections> connections = nullptr;
  std::string prefix = "";
  std::string name = "world";
  std::string title = "";      ///< empty: as `name`
  std::vector<int> job_ranks;  ///< of each rank of the group
  int rank = 0;
  std::string backend;
  std::chrono::milliseconds timeout{0};
  std::optional<base::Deadline> deadline = {};  ///< of making it; else `timeout` from now
  std::string reach = {};
  bool is_kept_by_rank = true;  ///< the store
  ConsistencyCheck check_consistency = ConsistencyCheck::kFirst;
  std::shared_ptr<GroupRegistry> registry = nullptr;  ///< null: a new one
  std::shared_ptr<GroupOwner> owner = nullptr;        ///< null: none
};

/// As make_group.
std::shared_ptr<GroupState> make_state(StateOptions options);

/// 0 to size - 1.
std::vector<int> all_ranks(int size);

}  // namespace cohort::comm
