// A thread waits in the inbox for the generation's end. Then it closes the client of the store, and ends the
// calls of the groups: so whatever waits in one of them throws, on the thread of whoever made the call. The
// inbox says why, so each error is the same one, also of calls that come later.
//
// Once a second that thread looks whether the training thread waits in a call, and tells the agent, which
// looks for processes that neither get on nor wait. Always: it has the scope only for that, and while it ends
// calls. What nobody holds any more goes at once.
//
// To connect, and to make a group, may take as long as another process likes. So another thread does it, and
// the caller waits in the inbox. After the generation's end that thread is left behind, and ends soon. What
// Gloo does to connect with a process that has died ends after the group's timeout, on a thread of its own.
#include "cohort/elastic/internal/generation_scope.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/comm/failed_call.h"
#include "cohort/comm/init.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/elastic/internal/connections.h"
#include "cohort/elastic/internal/generation_store.h"
#include "cohort/net/tls_options.h"

namespace cohort::elastic {
namespace {

using base::concat;

// A process that has lost another one hears so from its agent, or loses its own link to it, by then.
constexpr std::chrono::milliseconds kLeastNewsTime(5'000);
constexpr int kSilencesUntilNews = 2;
// Of a connection to the store, and of each request that does not wait for a key.
constexpr std::chrono::milliseconds kStoreAnswerTime(30'000);

// The store is on the way to processes of other hosts.
std::string host_to_reach(const std::string& address) {
  return address.starts_with("unix:") ? "" : host_of(address);
}

}  // namespace

GenerationScope::GenerationScope(std::shared_ptr<ProcessInbox> inbox, const ScopePlace& place)
    : inbox_(std::move(inbox)),
      place_(place),
      link_silence_(link_silence_of_process()),
      store_(std::make_shared<StoreClient>(kStoreAnswerTime, link_silence_)) {}

std::shared_ptr<GenerationScope> GenerationScope::make(std::shared_ptr<ProcessInbox> inbox,
                                                       const ScopePlace& place) {
  auto scope = std::make_shared<GenerationScope>(inbox, place);
  base::run_detached("the end of a generation",
                     [inbox, number = place.generation, look = place.long_wait, weak = std::weak_ptr(scope)] {
                       while (!inbox->wait_for_end_of(number, base::Deadline(look))) {
                         const auto waiting = weak.lock();
                         if (waiting == nullptr) return;
                         waiting->tell_long_wait();
                       }
                       if (const auto ended = weak.lock()) ended->end_calls();
                     });
  return scope;
}

std::exception_ptr GenerationScope::wait_for_end() const {
  const base::Deadline deadline(std::max(kLeastNewsTime, kSilencesUntilNews * link_silence_));
  return inbox_->wait_for_end_of(place_.generation, deadline, /*is_lost=*/true);
}

// Where a process is gone nobody could make the step again: its state is half changed on all.
void GenerationScope::check_call() const {
  if (!is_changing_ || std::this_thread::get_id() != thread_) return;
  throw UsageError(
      "elastic.session",
      concat("a group's call, or one of the store, after begin_changes() in generation ", place_.generation),
      "the call before begin_changes(): a failure there repeats the step");
}

// What other threads wait for does not hold the steps up.
void GenerationScope::begin_wait() {
  if (std::this_thread::get_id() != thread_) return;
  const std::lock_guard lock(wait_mutex_);
  if (num_waits_++ == 0) wait_began_ = base::Deadline::Clock::now();
}

void GenerationScope::end_wait() {
  if (std::this_thread::get_id() != thread_) return;
  const std::lock_guard lock(wait_mutex_);
  if (--num_waits_ > 0) return;
  if (const auto exchange = place_.exchange.lock()) {
    exchange->add_wait(base::Deadline::Clock::now() - wait_began_);
  }
  if (std::exchange(is_wait_told_, false)) inbox_->tell_long_wait(false);
}

// Under the mutex: what is told last is that the wait has ended.
void GenerationScope::tell_long_wait() {
  const std::lock_guard lock(wait_mutex_);
  const bool is_long = num_waits_ > 0 && base::Deadline::Clock::now() - wait_began_ >= place_.long_wait;
  if (is_long && !std::exchange(is_wait_told_, true)) inbox_->tell_long_wait(true);
}

// As the session's exchange does: these processes may be stuck for good, and this one continues without them.
std::exception_ptr GenerationScope::give_up(const std::vector<int>& ranks, base::Deadline deadline,
                                            const std::string& where) {
  const std::string who = concat(ranks.size() == 1 ? "process " : "processes ", base::join(ranks));
  try {
    inbox_->give_up({.generation = place_.generation,
                     .is_in_step = true,
                     .needed = ranks,
                     .deadline = deadline,
                     .what = concat(who, " in ", where)});
  } catch (...) {
    return std::current_exception();
  }
}

void GenerationScope::end_calls() {
  std::vector<std::weak_ptr<comm::Group::State>> groups;
  std::vector<std::shared_ptr<comm::Group::State>> kept;
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    groups.swap(groups_);
    kept.swap(kept_);
  }
  // The store first: a call that has lost its process asks it who else has.
  store_->close();
  for (const auto& group : groups) {
    if (auto state = group.lock()) comm::end_calls(comm::Group(std::move(state)));
  }
  // A subgroup may have outlived the group that it was made of.
  for (auto& state : kept) comm::end_calls(comm::Group(std::move(state)));
}

void GenerationScope::keep(std::shared_ptr<comm::Group::State> group) {
  const std::lock_guard lock(mutex_);
  if (has_ended_ || std::ranges::find(kept_, group) != kept_.end()) return;
  kept_.push_back(std::move(group));
}

// At once, so that who asks for a store or a group hears what stands in the way. A time that is over is no
// sign of an end that is yet to come.
void GenerationScope::connect() {
  const base::Deadline deadline = comm::StoreDeadline::current();
  try {
    store_->at(place_.store, deadline);
  } catch (const RendezvousError&) {
    if (const std::exception_ptr end = deadline.expired() ? this->end() : wait_for_end())
      std::rethrow_exception(end);
    throw;
  }
}

c10::intrusive_ptr<c10d::Store> GenerationScope::store_at(const std::string& folder,
                                                          std::chrono::milliseconds timeout) {
  connect();
  return c10::make_intrusive<GenerationStore>(
      [store = store_, address = place_.store] { return store->at(address, comm::StoreDeadline::current()); },
      shared_from_this(), concat("generation/", place_.generation, "/", folder, "/"), timeout);
}

// `body` runs on a thread that may be left behind. Whatever of it may notice an end before the inbox does has
// waited for the news: the connection, the store and the group.
template <typename Body>
auto GenerationScope::run_until_end(const char* what, Body body) {
  auto result = base::run_detached(what, [self = shared_from_this(), body] {
    try {
      return body(*self);
    } catch (...) {
      if (const std::exception_ptr end = self->end()) std::rethrow_exception(end);
      throw;
    }
  });
  result.on_ready([inbox = inbox_] { inbox->post([] {}); });
  std::vector<int> all;
  for (int process = 0; process < place_.num_processes; ++process) all.push_back(process);
  const comm::OwnerWait waiting(this);
  // The body has a deadline of its own, and says more than that it is late.
  inbox_->wait([&] { return result.ready(); }, {.generation = place_.generation,
                                                .is_in_step = true,
                                                .needed = all,
                                                .deadline = base::Deadline::never(),
                                                .what = what});
  return result.get(base::Deadline::never());
}

c10::intrusive_ptr<c10d::Store> GenerationScope::store() {
  return run_until_end("the store of a generation",
                       [](GenerationScope& self) { return self.store_at("user", self.place_.timeout); });
}

// Where an attempt has failed here, it may have succeeded elsewhere: processes no longer agree on numbers.
comm::Group GenerationScope::make_group(const GroupOptions& options) {
  if (has_failed_) {
    if (const std::exception_ptr ended = end()) std::rethrow_exception(ended);
    throw UsageError("elastic.session",
                     concat("group ", num_groups_ - 1, " of generation ", place_.generation,
                            " could not be made: there is no further one in this generation"),
                     "the error of that group; Session::enter() where there is another generation");
  }
  has_failed_ = true;  // until it is there
  comm::Group group =
      run_until_end("a group of a generation", [options, number = num_groups_++](GenerationScope& self) {
        return self.make_group_now(options, number);
      });
  has_failed_ = false;
  return group;
}

// Processes make their groups in the same order: so a number names the same group on each.
comm::Group GenerationScope::make_group_now(const GroupOptions& options, int number) {
  const auto timeout = options.timeout.count() == 0 ? place_.timeout : options.timeout;
  const auto store = [&] {
    const comm::StoreDeadline until{base::Deadline(timeout)};
    return store_at(concat("group/", number), timeout);
  };
  comm::Group group =
      comm::join_process_group({.store = store(),
                                .where = concat("the store of generation ", place_.generation),
                                .rank = place_.process,
                                .size = place_.num_processes,
                                .name = concat("generation ", place_.generation, " group ", number),
                                .title = concat("group ", number),  // the same rows in each generation
                                .backend = options.backend,
                                .reach = host_to_reach(place_.store),
                                .timeout = timeout,
                                .check_consistency = options.check_consistency,
                                .owner = shared_from_this()});
  if (group.backend() == "gloo" && place_.is_over_hosts && net::TlsOptions::of_process()) {
    base::warn_once("elastic.groups",
                    "[elastic.groups] the links of this run are encrypted; what its groups send is not");
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group.shared_state());
  return group;
}

}  // namespace cohort::elastic
