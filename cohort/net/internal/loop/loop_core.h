#pragma once

#include <asio/io_context.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cohort/net/internal/loop/active_links.h"
#include "cohort/net/internal/loop/connection_table.h"
#include "cohort/net/internal/loop/frame_io.h"
#include "cohort/net/internal/loop/hand_over.h"
#include "cohort/net/internal/loop/node_lock.h"
#include "cohort/net/internal/shared_heap.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/internal/tls/context.h"
#include "cohort/net/node_options.h"

/// What the parts of a node run on. Sources of the node alone include it: asio's headers are long.
namespace cohort::net::node_detail {

/// This process, as its hello shows it to peers.
struct ProcessIdentity {
  std::string incarnation;
  std::string place;  ///< place_of_process()
  std::string began;  ///< base::process_start()
};

/// Loop owns it. The parts that it does not have itself hold a reference to it.
///
/// Invariants: only threads of NodeThread run `io`, and each keeps the Loop. So functions that `io` will run
/// may hold pointers to parts. They may not hold the Loop, which would keep itself. They run without the
/// mutex.
/// Threads: what is const, and `io`, by any. All else as its type says.
struct LoopCore {
  /// Throws: UsageError for files of certificates that cannot be used.
  LoopCore(NodeOptions options, std::shared_ptr<Handler> handler);

  const NodeOptions options;
  const ProcessIdentity self;
  const std::shared_ptr<SharedHeap> heap;       ///< null: without shared memory
  const std::unique_ptr<const TlsContext> tls;  ///< null: no TLS
  asio::io_context io;
  NodeLock lock;
  HandOver hand_over;
  ConnectionTable table;
  std::vector<SocketAddress> listened;  ///< at which this node listens, under the mutex
  ActiveLinks active{table};
  FrameIo frames{table, hand_over};
};

}  // namespace cohort::net::node_detail
