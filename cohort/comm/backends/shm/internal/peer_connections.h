#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/threads/deadline.h"

namespace cohort::comm::shm {

using base::KeyValueStore;

/// A connection from each rank of a group to each other: memory is handed over it, and it says when a peer is
/// gone. Threads: one caller at a time.
class PeerConnections {
 public:
  /// All ranks are connected. Blocks until then. Every rank of the group makes one.
  /// Throws: RendezvousError naming the ranks that did not come; PeerError as soon as one has died, or says
  /// on the store under "not made" why it could not come; UsageError naming those on other hosts.
  PeerConnections(KeyValueStore& kv_store, int rank, int size, base::Deadline deadline);

  /// Hands memory over, with a number that says which. The peer need not wait for it.
  /// Throws: PeerError when the peer is gone.
  void send(int peer, int fd, std::uint64_t number) const;

  /// What a peer handed over first and was not taken yet; nothing when there is none.
  /// Throws: SystemError where this process may have no more file descriptors.
  std::optional<std::pair<std::uint64_t, base::Fd>> receive(int peer) const;

  /// Why nothing more can come from that rank; empty while it lives. Costs a system call.
  std::string why_gone(int peer) const;

 private:
  struct Connection {
    base::Fd socket;
    // All groups share it; null where the system cannot say more than the socket does.
    std::shared_ptr<const base::Fd> process;
    pid_t pid = 0;  // 0: not visible from here
  };
  void adopt(int peer, base::Fd socket);
  void accept_others(const base::Fd& listener, KeyValueStore& kv_store,
                     const std::vector<std::string>& addresses, const std::string& token, int rank,
                     base::Deadline deadline);

  std::vector<Connection> connections_;
};

}  // namespace cohort::comm::shm
