// A group is made in three steps: the backend connects, all ranks wait at a barrier, and only then is it
// handed out. A rank that cannot make it leaves the reason under "not made" and releases all ranks, so no
// peer waits in vain. Always: the first failure breaks a group for good, and later calls to the backend throw
// it. Calls that must wait go through the group's thread in order. Its count of tasks falls only when a call
// has begun, so no later call overtakes it.
#include "cohort/comm/internal/group_state.h"

#include <algorithm>
#include <array>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/missing_ranks.h"
#include "cohort/comm/internal/numeric_names.h"
#include "cohort/comm/store_adapter.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPartTime(3000);  // how long rank 0 waits for those that have joined and may have died

// A time that is over, a wrong call, and what failed on this rank alone are no signs of an owner's end that
// is yet to come. Other words of a backend may be: it has many for a peer that is gone.
bool may_come_of_end(const std::exception& error) {
  const ErrorCause cause = cause_of(error);
  const bool is_unknown = cause == ErrorCause::kOther && dynamic_cast<const Error*>(&error) == nullptr;
  return cause == ErrorCause::kPeer || is_unknown;
}

}  // namespace

StoreAdapter store_adapter_of(const GroupState& state) {
  return StoreAdapter(state.store, state.connections, state.prefix);
}

base::Words gather_words(StoreAdapter kv_store, const std::string& key, int rank, int size,
                         const std::string& word, base::Deadline deadline) {
  try {
    return base::all_gather_words(kv_store, key, rank, size, word, deadline);
  } catch (const TimeoutError&) {  // it is silent
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error("the store cannot be reached: " + base::message_of(error));
  }
}

void leave_key(GroupState& state, const std::string& key, base::Deadline deadline) {
  const auto keeper = std::ranges::find(state.job_ranks, 0);
  if (!state.is_kept_by_rank || keeper == state.job_ranks.end()) return;
  try {
    deadline = deadline.sooner(base::Deadline(kPartTime));
    const StoreDeadline until(deadline.later(kLastAnswerTime));
    StoreAdapter kv_store = store_adapter_of(state);
    base::StoreBarrier barrier(kv_store, key + "/departed", state.rank, state.size);
    barrier.arrive();
    if (keeper - state.job_ranks.begin() == state.rank && barrier.wait(deadline)) barrier.remove();
  } catch (const std::exception&) {  // whoever kept it did not wait, and has nothing to wait for
  }
}

void GroupState::count(const char* call, const CallCounters& added) {
  const std::lock_guard lock(mutex_);
  auto found = counters_.find(call);
  if (found == counters_.end()) found = counters_.emplace(call, CallCounters{}).first;
  CallCounters& sum = found->second;
  sum.calls += added.calls;
  sum.bytes += added.bytes;
  sum.waiting += added.waiting;
  sum.total += added.total;
}

std::map<std::string, CallCounters> GroupState::counters() const {
  const std::lock_guard lock(mutex_);
  return {counters_.begin(), counters_.end()};
}

int GroupState::take_row() {
  const std::lock_guard lock(mutex_);
  // Rows are used again, so there are as many as calls were ever under way at once.
  auto free = std::find(rows_.begin(), rows_.end(), false);
  if (free == rows_.end()) free = rows_.insert(rows_.end(), false);
  *free = true;
  return static_cast<int>(free - rows_.begin());
}

void GroupState::give_row(int row) {
  const std::lock_guard lock(mutex_);
  rows_[static_cast<std::size_t>(row)] = false;
}

std::string GroupState::row_name(int row) const {
  return row == 0 ? title : base::concat(title, " (", row + 1, ")");
}

// A call may begin while another one that has failed still waits for the news.
void GroupState::check_usable() {
  check_owner();
  bool may_be_end = false;
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) return;
    may_be_end = may_be_end_;
  }
  if (may_be_end) await_end();
  const std::lock_guard lock(mutex_);
  throw CommError("comm.group",
                  base::concat("group '", name, "' failed before and cannot be used: ", broken_),
                  "end the process and resume from a checkpoint");
}

void GroupState::check_owner() const {
  throw_if_ended();
  if (owner != nullptr) owner->check_call();
}

void GroupState::throw_if_ended() const {
  const std::exception_ptr end = owner == nullptr ? nullptr : owner->end();
  if (end != nullptr) std::rethrow_exception(end);
}

void GroupState::throw_if_ending(const std::exception& error) {
  if (may_come_of_end(error)) await_end();
  throw_if_ended();
}

// Throws the end, if it has come.
void GroupState::await_end() {
  if (owner == nullptr) return;
  std::call_once(end_awaited_, [&] { end_ = owner->wait_for_end(); });
  if (end_ != nullptr) std::rethrow_exception(end_);
}

void GroupState::mark_broken(const std::string& what, const std::exception& error, base::Deadline until) {
  mark_broken(base::concat(what, ": ", base::message_of(error)), until, may_come_of_end(error));
}

GroupState::OwnTime::OwnTime(GroupState& group, base::Deadline deadline) : group_(group) {
  const std::lock_guard lock(group_.mutex_);
  place_ = group_.own_deadlines_.insert(group_.own_deadlines_.end(), deadline);
}

GroupState::OwnTime::~OwnTime() {
  const std::lock_guard lock(group_.mutex_);
  group_.own_deadlines_.erase(place_);
}

// Without them the owner may continue, and this rank with it. Where no rank is silent, all make different
// calls: they would do so again. The first call that is late ends all, and somebody may wait for a later one.
void GroupState::give_up(const std::vector<int>& ranks, base::Deadline deadline,
                         const std::string& where) const {
  if (owner == nullptr || ranks.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    for (const base::Deadline& other : own_deadlines_) deadline = deadline.sooner(other);
  }
  if (!deadline.expired()) return;
  std::vector<int> ranks_of_job;
  for (const int silent : ranks) ranks_of_job.push_back(job_ranks[static_cast<std::size_t>(silent)]);
  if (const auto end = owner->give_up(ranks_of_job, deadline, where)) std::rethrow_exception(end);
}

void GroupState::check_carries(c10::Device device) const {
  if (device.is_cpu()) return;
  for (const c10::Device carried : group->getDeviceTypes()) {
    if (carried.type() == device.type()) return;
  }
  throw UsageError("comm.group",
                   base::concat("group '", name, "' of backend ", backend, " carries no tensors on ", device),
                   owner == nullptr ? "backend nccl for those on a GPU, or a model on the CPU"
                                    : "tensors on the CPU: no call on a GPU could be ended");
}

namespace {

struct GroupRegistries {
  std::mutex mutex;
  std::vector<std::weak_ptr<GroupRegistry>> list;
};

// It is leaked on purpose: a hang detector may still ask while statics are destroyed.
GroupRegistries& registries() {
  static GroupRegistries* all = new GroupRegistries;
  return *all;
}

std::shared_ptr<GroupRegistry> new_registry(int rank, int size) {
  auto registry = std::make_shared<GroupRegistry>(rank, size);
  GroupRegistries& all = registries();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.list, [](const auto& member) { return member.expired(); });
  all.list.push_back(registry);
  return registry;
}

void report_init_failure(GroupState& state, const std::string& what, base::Deadline deadline) {
  try {
    const StoreDeadline until(deadline);
    StoreAdapter kv_store = store_adapter_of(state);
    // The reason before the barrier: who passes the barrier looks for the reason at once.
    kv_store.set("not made", base::concat("rank ", state.rank, ": ", what));
    base::StoreBarrier(kv_store, "made", state.rank, state.size).release_all();
  } catch (const std::exception&) {  // the store went with the rank that kept it
  }
}

std::string making_of(const GroupState& state) {
  return base::concat("the making of group '", state.name, "'");
}

std::string cannot_make(const GroupState& state) {
  return base::concat("cannot make group '", state.name, "' (rank ", state.rank, "/", state.size, ", ",
                      state.backend, ")");
}

// Ours say who is missing. A backend's does not: who has not failed too is.
[[noreturn]] void fail_to_make(GroupState& state, const std::exception& error, base::Deadline deadline) {
  const base::Deadline until = end_of_failure(deadline);
  // First, since the others wait at the barrier for this rank.
  report_init_failure(state, error.what(), until);
  state.mark_broken(error.what(), until);
  state.throw_if_ending(error);
  const bool has_type = cause_of(error) != ErrorCause::kOther;
  if (const auto* const named = dynamic_cast<const NamesRanks*>(&error)) {
    state.give_up(named->ranks(), deadline, making_of(state));
    if (has_type) throw_translated(error, "comm.group", cannot_make(state));
  }
  if (dynamic_cast<const Error*>(&error) != nullptr) throw;
  const GroupState::Silence& silence = state.find_silent_ranks(until);
  if (has_type) state.give_up(silence.ranks, deadline, making_of(state));
  throw_translated(error, "comm.group", cannot_make(state) + silence.text);
}

// A rank that has all its connections may release the group at once; its peers that are not as far would
// take that for a crash. So the group is there when all have it.
void wait_until_made(GroupState& state, base::Deadline deadline) {
  const std::string where = cannot_make(state);
  std::string error;
  std::vector<int> missing;
  try {
    StoreAdapter kv_store = store_adapter_of(state);
    base::StoreBarrier barrier(kv_store, "made", state.rank, state.size);
    barrier.arrive();
    if (!barrier.wait(deadline)) missing = barrier.missing();  // none: the last came as the time was over
    if (missing.empty()) {
      if (!kv_store.has("not made")) return;
      throw PeerError("comm.group", base::concat(where, ": ", kv_store.get("not made")));
    }
  } catch (const TimeoutError& silence) {
    throw TimeoutError("comm.group", base::concat(where, ": ", silence.what()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& failure) {
    error = base::message_of(failure);
  }
  if (!error.empty())
    throw PeerError("comm.group", base::concat(where, ": the store cannot be reached: ", error));
  throw MissingRanks<TimeoutError>(
      missing, "comm.group", base::concat(where, ": ", base::format_list("rank", missing), " did not come"));
}

}  // namespace

bool GroupState::checks(std::int64_t number) const {
  constexpr std::int64_t kSteps = 10, kCalls = 1000;
  if (check_consistency == ConsistencyCheck::kOff || size == 1 || !is_distributed) return false;
  if (check_consistency == ConsistencyCheck::kAlways) return true;
  // Training repeats its calls: what agreed for ten steps is trusted, or for 1000 calls without a step.
  const std::int64_t done = steps.load();
  return done == 0 ? number < kCalls : done < kSteps;
}

base::Future<void> GroupState::enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (thread_ == nullptr) {
    // It does not spin: the cores compute while calls wait.
    thread_ = std::make_unique<base::SerialQueue>(
        base::SerialQueue::Options{.name = "comm:" + name, .spin = std::chrono::microseconds(0)});
  }
  queued_->fetch_add(1);
  return thread_->submit("begin a call", [queued = queued_, task = std::move(task)] {
    // The next call may be begun by its caller, so not before this one has.
    const struct Ends {
      std::atomic<int>& queued;
      ~Ends() { queued.fetch_sub(1, std::memory_order_release); }
    } ends{*queued};
    task();
  });
}

void GroupState::share_with_c10d() {
  // First: calls that are made from now on do not queue, so the queue only becomes shorter.
  is_shared_with_c10d_.store(true);
  if (owner != nullptr) {
    owner->keep(shared_from_this());
    throw_if_ended();  // after keep(): where the owner ends between the two it ends the calls
  }
  if (is_queue_empty()) return;
  wait_until_begun(base::Deadline(timeout), base::concat("process_group() of group '", name, "'"));
}

void GroupState::wait_until_begun(base::Deadline deadline, const std::string& for_whom) const {
  base::Future<void> begun;  // the queue need not become empty: further calls may come all the time
  {
    const std::lock_guard lock(mutex_);
    if (thread_ == nullptr || is_queue_empty()) return;
    begun = thread_->submit("all calls before have begun", [] {});
  }
  if (begun.wait(deadline)) return;
  begun.abandon();
  const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
  throw TimeoutError("comm.group",
                     base::concat(for_whom, " (rank ", rank, "/", size, ", ", waited,
                                  " ms): calls that were made before have not begun, as not all ranks have "
                                  "made them"),
                     "wait for them first");
}

void GroupRegistry::add(const std::shared_ptr<GroupState>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& member) { return member.expired(); });
  groups_.push_back(group);
}

std::vector<std::shared_ptr<GroupState>> GroupRegistry::groups() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<GroupState>> living;
  for (const auto& member : groups_) {
    // The registry holds it weakly, as it must not keep a group open that its user released.
    if (auto group = member.lock()) living.push_back(std::move(group));
  }
  return living;
}

bool GroupRegistry::set_hang_detector(const std::shared_ptr<HangDetector>& hang_detector) {
  const std::lock_guard lock(mutex_);
  if (hang_detector != nullptr && !hang_detector_.expired()) return false;
  hang_detector_ = hang_detector;
  return true;
}

std::shared_ptr<HangDetector> GroupRegistry::hang_detector() const {
  const std::lock_guard lock(mutex_);
  return hang_detector_.lock();
}

std::vector<std::shared_ptr<GroupRegistry>> all_group_registries() {
  GroupRegistries& all = registries();
  const std::lock_guard lock(all.mutex);
  std::vector<std::shared_ptr<GroupRegistry>> living;
  for (const auto& member : all.list) {
    if (auto registry = member.lock()) living.push_back(std::move(registry));
  }
  return living;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

std::shared_ptr<GroupState> make_state(StateOptions options) {
  const int size = static_cast<int>(options.job_ranks.size());
  if (options.timeout.count() <= 0) {
    throw UsageError("comm.group",
                     base::concat("timeout is ", options.timeout.count(), " ms, expected more than 0"));
  }
  if (options.rank < 0 || options.rank >= size) {
    throw UsageError("comm.group", base::concat("rank is ", options.rank, ", expected 0 to ", size - 1));
  }
  if (options.owner != nullptr && !backend_type(options.backend).ends_calls) {
    throw UsageError("comm.group",
                     base::concat("group '", options.name, "' ends with its owner, and calls of backend ",
                                  options.backend, " cannot be ended"),
                     "backend shm or gloo, and tensors on the CPU");
  }
  use_numeric_names();  // the store may be one that the caller has opened
  auto state = std::make_shared<GroupState>();
  state->name = options.name;
  state->title = options.title.empty() ? options.name : options.title;
  state->backend = options.backend;
  state->rank = options.rank;
  state->size = size;
  state->job_ranks = std::move(options.job_ranks);
  state->timeout = options.timeout;
  state->reach = options.reach;
  state->is_kept_by_rank = options.is_kept_by_rank;
  state->check_consistency = options.check_consistency;
  state->owner = std::move(options.owner);
  const base::Deadline deadline = options.deadline.value_or(base::Deadline(options.timeout));
  const StoreDeadline until(deadline.later(kLastAnswerTime));
  const std::string own_prefix = "cohort/" + options.name;
  state->prefix = options.prefix.empty() ? own_prefix : base::concat(options.prefix, "/", own_prefix);
  const bool is_subgroup = options.connections != nullptr;
  state->connections = is_subgroup
                           ? std::move(options.connections)
                           : std::make_shared<StoreConnections>(options.store, std::move(options.waits));
  // A name is given once in a job, so the keys of two groups do not meet.
  state->store = c10::make_intrusive<c10d::PrefixStore>(own_prefix, options.store);
  const milliseconds timeout = std::min(options.timeout, kLongestTime);
  if (!is_subgroup) state->store->setTimeout(timeout);  // else it is the parent's
  const auto make = [&](const std::string& backend) {
    return make_backend(backend, {.store = c10::make_intrusive<c10d::PrefixStore>(backend, state->store),
                                  .connections = state->connections,
                                  .prefix = base::concat(state->prefix, "/", backend),
                                  .rank = options.rank,
                                  .size = size,
                                  .timeout = timeout,
                                  .deadline = deadline,
                                  .reach = options.reach,
                                  .owner = state->owner});
  };
  BackendInstance made;
  std::optional<BackendInstance> for_cpu;  // beside one for GPUs: flags, counters and text are on the CPU
  try {
    made = make(options.backend);
    if (made.device != c10::kCPU) for_cpu = make(choose_backend({}).backend);
  } catch (const std::exception& error) {
    fail_to_make(*state, error, deadline);
  }
  try {
    if (made.is_distributed && size > 1) wait_until_made(*state, deadline);
  } catch (const Error& error) {
    state->mark_broken(error.what(), end_of_failure(deadline));  // who asks is told that it has noticed
    state->throw_if_ending(error);
    if (const auto* const named = dynamic_cast<const NamesRanks*>(&error)) {
      state->give_up(named->ranks(), deadline, making_of(*state));
    }
    throw;
  }
  state->is_distributed = made.is_distributed;
  state->deterministic_rank_order = made.deterministic_rank_order;
  state->no_message_tags = made.no_message_tags;
  state->may_raise_sigpipe = (for_cpu ? *for_cpu : made).may_raise_sigpipe;
  state->shares_queue = made.shares_queue;
  state->device = made.device;
  state->group = c10::make_intrusive<c10d::ProcessGroup>(state->store, options.rank, size);
  state->group->setBackend(made.device, made.type, made.backend);
  if (for_cpu) state->group->setBackend(for_cpu->device, for_cpu->type, for_cpu->backend);
  state->group->setDefaultBackend(made.type);
  state->group->setGroupName(options.name);
  state->registry = options.registry != nullptr ? options.registry : new_registry(options.rank, size);
  // Last, since a hang detector on another thread reads each group that is in the registry.
  state->registry->add(state);
  return state;
}

}  // namespace cohort::comm
