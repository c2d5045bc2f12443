#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/rank_process.h"
#include "cohort/membership/rank_link.h"

namespace cohort::launch {

/// A rank of an elastic program, and this agent's link to it. Nothing here waits for the rank. Threads: one
/// caller. Not for users of the library.
class LinkedRank {
 public:
  /// The program runs. `spec` gets the rank's end of the link. Throws: SystemError.
  LinkedRank(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog);

  RankProcess& process() { return process_; }
  const RankProcess& process() const { return process_; }
  /// What it has said last.
  const membership::RankStatus& status() const { return status_; }

  /// What it is to know from now on. Gives the order its number.
  void send(membership::RankOrder order);
  std::uint64_t num_orders() const { return num_orders_; }
  /// Memory of its place, in which the rank before it may have left its state.
  void give_region(const Fd& region);
  /// Reads what it has said, and sends what is left. One that says what this version does not know is killed,
  /// and the log says so.
  void exchange();
  /// Adds what poll() must wait for, but for the process itself.
  void add_waits(std::vector<pollfd>& waits) const;

 private:
  // The rank's end lives here until the rank has it.
  LinkedRank(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog,
             std::pair<membership::RankLink, membership::RankLink> ends);
  template <typename Send>
  void send_unless_gone(const Send& send);

  membership::RankLink link_;
  RankProcess process_;
  membership::RankStatus status_;
  std::uint64_t num_orders_ = 0;
  bool is_gone_ = false;  // the rank has closed its end: it is ending
};

}  // namespace cohort::launch
