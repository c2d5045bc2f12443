#pragma once

#include <string>
#include <vector>

#include "cohort/launch/internal/agent_group.h"
#include "cohort/launch/internal/agent_store_client.h"

namespace cohort::launch {

/// The agents of several nodes, which leave each other words on a store that node 0 keeps. Node 0 joins the
/// reports and decides alone on a restart, so either all nodes start the ranks again or none does.
///
/// Keys on the store, A being the attempt and N the node: fail/A (some rank failed: end yours), end/A/N (what
/// came of mine), result/A (node 0: what comes of all), result_seen/A/N (I have read it: the store may go),
/// signal (someone asked to stop), abort (an agent gives up, and why).
///
/// Threads: as AgentGroup; the store is asked by the client's thread alone.
class StoreAgentGroup : public AgentGroup {
 public:
  /// The rendezvous is over: `client` is in a session. Ownership: refers to both.
  StoreAgentGroup(const RunOptions& options, AgentStoreClient& client);

  int fd() const override { return client_.fd(); }
  std::chrono::milliseconds poll_interval() const override;
  void acknowledge() override { client_.acknowledge(); }
  void busy_until(base::Deadline deadline) override { client_.busy_until(deadline); }
  void begin_attempt(int number) override;
  void announce_stop(int signal) override;
  void announce_failure() override;
  void announce_abort(const std::string& why) override;
  int stop_signal() const override;
  bool is_attempt_over() const override;
  void post_report(const AttemptReport& own_report) override;
  std::optional<AttemptReport> result() override;
  bool may_leave() const override;

 private:
  std::string key(const char* what) const;
  std::string key(const char* what, int node) const;
  std::optional<std::string> received_if_alive(const std::string& key) const;

  const RunOptions& options_;
  AgentStoreClient& client_;
  int attempt_ = 0;
  std::vector<AttemptReport> reports_;  // node 0: of this attempt, those of nodes 0, 1, ... that have come
};

}  // namespace cohort::launch
