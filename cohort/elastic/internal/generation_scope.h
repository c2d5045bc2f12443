#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/threads/future.h"
#include "cohort/comm/group.h"
#include "cohort/comm/group_owner.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/internal/process_inbox.h"
#include "cohort/elastic/internal/store_client.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {

/// Which generation a scope is of.
struct ScopePlace {
  std::uint64_t generation = 0;
  int process = 0, num_processes = 1;
  std::string store = {};      ///< address
  bool is_over_hosts = false;  ///< its processes are of several agents
  std::chrono::milliseconds timeout{600'000};
  std::weak_ptr<NetSliceExchange> exchange = {};  ///< whose steps take waits out of their work
  std::chrono::milliseconds long_wait{1'000};     ///< after which a wait is told to the agent
};

/// What a user's own code has of a generation: its store, and groups of its processes. All of it ends with
/// the generation, whatever waits. Ownership: groups and stores share it, and outlast the session. Threads:
/// one; those of GroupOwner any.
class GenerationScope : public comm::GroupOwner, public std::enable_shared_from_this<GenerationScope> {
 public:
  static std::shared_ptr<GenerationScope> make(std::shared_ptr<ProcessInbox> inbox, const ScopePlace& place);
  GenerationScope(std::shared_ptr<ProcessInbox> inbox, const ScopePlace& place);

  /// The thread that has made the scope changes the state, and makes no call until that is done. Another
  /// thread may finish what began before.
  void set_changing(bool is_changing) { is_changing_ = is_changing; }
  /// As Session::store().
  c10::intrusive_ptr<c10d::Store> store();
  /// As Session::make_group().
  comm::Group make_group(const GroupOptions& options);

  std::exception_ptr end() const override { return inbox_->end_of(place_.generation); }
  std::exception_ptr wait_for_end() const override;
  std::exception_ptr give_up(const std::vector<int>& ranks, base::Deadline deadline,
                             const std::string& where) override;
  void check_call() const override;
  void begin_wait() override;
  void end_wait() override;
  void keep(std::shared_ptr<comm::Group::State> group) override;

 private:
  void connect();
  c10::intrusive_ptr<c10d::Store> store_at(const std::string& folder, std::chrono::milliseconds timeout);
  comm::Group make_group_now(const GroupOptions& options, int number);
  void end_calls();
  void tell_long_wait();
  template <typename Body>
  auto run_until_end(const char* what, Body body);

  const std::shared_ptr<ProcessInbox> inbox_;
  const ScopePlace place_;
  const std::chrono::milliseconds link_silence_;
  const std::shared_ptr<StoreClient> store_;
  const std::thread::id thread_ = std::this_thread::get_id();  // the session's caller
  std::atomic<bool> is_changing_{false};
  int num_groups_ = 0;
  bool has_failed_ = false;  // to make one

  std::mutex wait_mutex_;  // of what follows
  int num_waits_ = 0;      // of `thread_`, each within the one before
  base::Deadline::Clock::time_point wait_began_;
  bool is_wait_told_ = false;

  std::mutex mutex_;  // of all below
  bool has_ended_ = false;
  std::vector<std::weak_ptr<comm::Group::State>> groups_;
  // Those whose c10d group the user has. They own this scope: the generation's end releases both.
  std::vector<std::shared_ptr<comm::Group::State>> kept_;
};

}  // namespace cohort::elastic
