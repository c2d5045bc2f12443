// A dying process closes its sockets one after another, so its listener may still take a probe when its link
// has ended. Then the probe is repeated, with the pauses of a caller that connects again. The first probe may
// find no descriptor, or no network. It is repeated until it is accepted or rejected.
#include "cohort/net/internal/loop/caller_probes.h"

#include <algorithm>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::chrono::milliseconds kMaxProbePause(1000);
// While the link is up. A firewall may reject each probe.
constexpr std::chrono::milliseconds kMaxFirstPause(30'000);

}  // namespace

void CallerProbes::link_up(const std::shared_ptr<PeerState>& peer, const Hello& hello) {
  peer->listener = {};
  // Its process is watched, or this process is the caller.
  if (peer->role == Role::kCaller || peer->process.end || !peer->connection) return;
  SocketAddress address = peer_end(peer->connection->socket.get());
  // An address that was translated on the way, or a proxy's, says nothing of the caller's port.
  if (hello.port == 0 || address.is_unix() || address.text != hello.address) return;
  address.set_port(hello.port);
  peer->listener.address = std::move(address);
  probe(peer);
}

void CallerProbes::link_down(const std::shared_ptr<PeerState>& peer) {
  if (peer->listener.was_reached && !peer->listener.probe) probe(peer);
}

void CallerProbes::probe(const std::shared_ptr<PeerState>& peer) {
  base::Fd fd = start_connect(peer->listener.address);
  if (!fd.is_open()) return on_result(peer, errno);
  const auto socket = std::make_shared<asio::posix::stream_descriptor>(core_.io);
  asio::error_code failure;
  socket->assign(fd.get(), failure);  // the kernel may watch no more sockets
  if (failure) return on_result(peer, failure.value());
  static_cast<void>(fd.release());
  peer->listener.probe = socket;
  // The peer alone keeps a probe: one that it has dropped has no result.
  const auto on_end = [this, peer, kept = std::weak_ptr(socket)](const asio::error_code& ended) {
    core_.hand_over.locked([&] {
      const auto ready = kept.lock();
      if (ended || !ready) return;
      const int error = connect_error(ready->native_handle());
      on_result(peer, error == 0 && is_connected_to_itself(ready->native_handle()) ? ECONNREFUSED : error);
    });
  };
  socket->async_wait(asio::posix::stream_descriptor::wait_write, on_end);
}

void CallerProbes::on_result(const std::shared_ptr<PeerState>& peer, int error) {
  CallerListener& listener = peer->listener;
  listener.probe.reset();
  if (error == 0 && !listener.was_reached) {
    listener.was_reached = true;
    listener.pause = CallerListener().pause;
  }
  const bool is_up = peer->session.is_up();
  // While the link is up, one probe that is answered is enough. Afterwards the answer says whether the
  // process lives.
  if (peer->session.ended() || listener.was_reached == is_up) return;
  if (error == ECONNREFUSED) {
    if (!is_up) on_death_(peer);
    return;
  }
  const auto timer = std::make_shared<asio::steady_timer>(core_.io, listener.pause);
  listener.pause = std::min(2 * listener.pause, is_up ? kMaxFirstPause : kMaxProbePause);
  listener.probe = timer;
  timer->async_wait([this, peer, kept = std::weak_ptr(timer)](const asio::error_code& ended) {
    core_.hand_over.locked([&] {
      if (!ended && kept.lock()) probe(peer);
    });
  });
}

}  // namespace cohort::net::node_detail
