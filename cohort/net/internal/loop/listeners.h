#pragma once

#include <asio/posix/stream_descriptor.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cohort/net/internal/loop/loop_core.h"
#include "cohort/net/internal/loop/peers.h"

namespace cohort::net::node_detail {

/// The sockets that listen, and which connections they accept.
///
/// Invariant: at most 64 connections have not proved that they know the secret. The oldest of them
/// goes if another comes. Where no descriptor is left, the oldest handshake goes.
/// Threads: under the mutex of NodeLock where a function does not say otherwise. Calls: Peers, HandOver.
class Listeners {
 public:
  Listeners(LoopCore& core, Peers& peers) : core_(core), peers_(peers) {}

  /// Without the mutex. Listens at an address, and returns the address for callers. Throws: UsageError where
  /// strangers can reach it and there is no secret; RendezvousError.
  std::string listen(const std::string& address, const std::string& host);
  /// Nobody listens any more.
  void stop();

 private:
  using Listener = std::shared_ptr<asio::posix::stream_descriptor>;

  void wait_to_accept(const Listener& listener);
  bool accept_all(int listener);
  bool make_room(Time now);
  void close_strangers(Time now);

  LoopCore& core_;
  Peers& peers_;
  std::vector<Listener> listeners_;
};

}  // namespace cohort::net::node_detail
