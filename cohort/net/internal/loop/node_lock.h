#pragma once

#include <condition_variable>
#include <mutex>

namespace cohort::net::node_detail {

/// The mutex of a node, and what functions of the node wait for.
///
/// Note [One mutex of a node]: the mutex guards the sessions, the connections and the events of a node. Bytes
/// that come change all three together. So do bytes that go, on the thread that sends. So no part of a node
/// has a mutex of its own: "under the mutex" in the headers of this folder means this mutex. It is not held
/// while a function of the handler runs, nor while a condition of Peer::poll_until() is asked. Both may call
/// the node.
struct NodeLock {
  std::mutex mutex;
  /// A peer has connected or gone, or a thread of the node has ended. After the stop also: a turn of HandOver
  /// has ended.
  std::condition_variable changed;
  bool is_closing = false;  ///< close() or stop() was called: there are no new peers.
  bool is_stopped = false;  ///< The node's own thread reads nothing more.
};

}  // namespace cohort::net::node_detail
