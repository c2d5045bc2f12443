#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cohort/elastic/internal/agent_link.h"
#include "cohort/elastic/internal/connections.h"
#include "cohort/elastic/internal/generation_scope.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/internal/process_inbox.h"
#include "cohort/elastic/internal/state_region.h"
#include "cohort/elastic/internal/state_transfer.h"
#include "cohort/elastic/internal/straggler_watch.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {

/// The session over a link to an agent and net.
class NetSession : public Session {
 public:
  NetSession(membership::RankLink link, int virtual_ranks, const SessionOptions& options);
  ~NetSession() override;

  int virtual_ranks() const override { return virtual_ranks_; }
  const SessionOptions& options() const { return options_; }
  void set_state(StateAccess state) override { state_ = std::move(state); }
  GenerationInfo enter(std::uint64_t committed_steps) override;
  bool must_enter() const override { return inbox_->must_enter(); }
  bool must_leave() const override { return inbox_->must_leave(); }
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return exchange_; }
  comm::Group make_group(const GroupOptions& options) override;
  c10::intrusive_ptr<c10d::Store> store() override;
  void begin_changes() override;
  void commit(std::uint64_t steps) override;
  void set_stop_signal(int signal) override { stop_signal_ = signal; }
  GenerationInfo finish() override;

 private:
  struct Times;
  void say_ready() {
    agent_->update([&](membership::RankStatus& status) {
      status.is_ready = true;
      status.timeout_ms = static_cast<std::uint64_t>(options_.timeout.count());
    });
  }
  GenerationScope& scope(const char* wanted);
  void end_step();
  void say_goodbye();
  bool take_region();
  bool take_over();
  bool has_first_state() const { return !is_changing_ && committed_ == first_committed_; }
  void hash_first_state();
  StateSnapshot state_to_keep() const;
  void hold_state();
  void enter_generation(Times& times);
  membership::Recovery exchange_hellos(const membership::Generation& generation, int process,
                                       base::Deadline deadline);
  bool recover(const membership::Generation& generation, const membership::Recovery& recovery, int process,
               Times& times);
  void log_change(const membership::Generation& generation, int process, const Times& times) const;
  base::Deadline deadline() const { return base::Deadline(options_.timeout); }

  const int virtual_ranks_;
  const SessionOptions options_;
  std::shared_ptr<ProcessInbox> inbox_;
  std::unique_ptr<Connections> connections_;
  std::shared_ptr<AgentLink> agent_;
  StateAccess state_;
  std::unique_ptr<StateRegion> region_;  // null: the agent has given none
  std::shared_ptr<NetSliceExchange> exchange_;
  std::shared_ptr<GenerationScope> scope_;  // null: nothing was asked of it in this generation
  GenerationInfo info_;                     // of the generation that it is in, or was in last
  std::uint64_t committed_ = 0;
  std::optional<std::uint64_t> first_committed_;  // of the first enter()
  std::optional<std::uint64_t> first_hash_;       // of that state, as long as enter() has not changed it
  bool has_state_of_run_ = false;                 // it had the newest state in some generation
  bool is_changing_ = false;                      // the state is of no use
  bool has_ended_ = false;                        // the run, and this process was told
  base::Deadline::Clock::time_point step_began_;
  bool is_first_step_ = false;  // of the generation
  int stop_signal_ = 0;
  StragglerWatch stragglers_;
};

}  // namespace cohort::elastic
