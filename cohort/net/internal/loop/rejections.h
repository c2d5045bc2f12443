#pragma once

#include <memory>

#include "cohort/base/error.h"
#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peers.h"

namespace cohort::net::node_detail {

/// Ends handshakes that have failed, so that both sides know why.
///
/// Invariants: a connection that is rejected keeps its place among the handshakes until the other side closes
/// it, or its deadline. At most 64 KiB of its bytes are read, and none is parsed.
/// Threads: under the mutex of NodeLock. Calls: Peers::lose().
class Rejections {
 public:
  Rejections(LoopCore& core, Peers& peers) : core_(core), peers_(peers) {}

  /// Another connection would fail in the same way: a caller's session ends, and who connected is rejected.
  void fail(const std::shared_ptr<Connection>& connection, Time now, const CommError& error);
  /// Reads what a rejected connection sends.
  void drop_input(const std::shared_ptr<Connection>& connection, Time now);

 private:
  void warn(int socket, const std::string& text, Time now);

  LoopCore& core_;
  Peers& peers_;
  Time next_warning_ = Time::min();
};

}  // namespace cohort::net::node_detail
