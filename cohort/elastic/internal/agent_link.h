#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/membership/rank_link.h"

namespace cohort::elastic {

/// The link to the agent, with a thread of its own. Threads: any.
class AgentLink {
 public:
  /// Called on the link's thread. Must neither wait nor throw.
  struct Listener {
    std::function<void(membership::RankOrder order)> on_order;
    /// Memory for the state, which is to outlive this process.
    std::function<void(base::Fd file)> on_region = [](base::Fd) {};
    /// The last call: the agent is gone, what it said cannot be read, or another function has thrown.
    std::function<void(std::string why)> on_end;
  };
  AgentLink(membership::RankLink link, Listener listener);
  ~AgentLink();
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  /// When the agent hears of a change.
  enum class When : std::uint8_t {
    kNow,
    kSoon,  ///< within 20 ms
  };
  /// Changes what the agent is told of this process. Does not wait.
  void update(const std::function<void(membership::RankStatus&)>& change, When when = When::kNow);

 private:
  void run();
  void send_status();
  base::Deadline next_status();

  membership::RankLink link_;  // of the thread, but for shutdown()
  const Listener listener_;
  const base::Fd wake_;
  std::mutex mutex_;  // of all below but the thread
  membership::RankStatus status_;
  bool is_dirty_ = false, is_urgent_ = false, is_stopping_ = false;
  base::Deadline::Clock::time_point last_sent_;

  base::SerialQueue thread_;
};

}  // namespace cohort::elastic
