// A caller of a local socket makes the link's memory and sends its descriptor with its hello; the listener
// maps it. Both show their heaps in the same way. Where one step fails the link goes down a rung: handles,
// then rings without handles, then the socket.
#include "cohort/net/internal/loop/hello_exchange.h"

#include <unistd.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/net/internal/loop/peer_state.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {
namespace {

// A caller makes the memory and sends it with its hello, a listener maps what came. Without memory the socket
// serves.
bool make_shared_link(Connection& connection) {
  if (!is_local(connection.socket.get())) return false;
  const Role role = connection.peer->role;
  PendingHandshake& handshake = *connection.handshake;
  try {
    if (role == Role::kCaller) {
      base::SharedMemory memory = SharedLink::make_memory();
      handshake.memory_to_send = memory.take_fd();
      connection.shared = std::make_unique<SharedLink>(std::move(memory), role);
    } else if (!handshake.descriptors_that_came.empty() && handshake.protocol.peer().has_shared_link) {
      connection.shared =
          std::make_unique<SharedLink>(SharedLink::map_memory(handshake.descriptors_that_came[0]), role);
    }
  } catch (const SystemError& error) {
    base::log_warning(base::concat("messages of this host go over a socket: ", base::message_of(error)));
  }
  return connection.shared != nullptr;
}

}  // namespace

bool may_be_of(const Hello& hello, const Connection& connection) {
  const pid_t known = peer_process(connection.socket.get());
  return known == 0 || known == hello.process;
}

Hello own_hello(const LoopCore& core, Connection& connection) {
  const PeerState& peer = *connection.peer;
  Hello hello;
  hello.name = core.options.name;
  hello.incarnation = core.self.incarnation;
  hello.session = peer.identity.session;
  hello.links = static_cast<std::uint64_t>(peer.session.num_links());
  hello.received = peer.session.received();
  hello.place = core.self.place;
  hello.process = ::getpid();
  hello.began = core.self.began;
  hello.window = core.options.window;
  hello.has_shared_link = core.options.shared_memory && make_shared_link(connection);
  connection.handshake->shows_heap = hello.has_shared_link;
  if (peer.role == Role::kCaller) {
    const SocketAddress own = own_end(connection.socket.get());
    hello.address = own.text;
    for (const SocketAddress& listened : core.listened) {
      if (listened.covers(own)) hello.port = listened.port();
    }
  }
  return hello;
}

Hello hello_without_session(const LoopCore& core) {
  Hello hello;
  hello.name = core.options.name;
  hello.incarnation = core.self.incarnation;
  return hello;
}

// The end of a process that is not seen would leave its blocks in use for ever: so only processes of one
// place have handles.
std::shared_ptr<const Handles> handles_for(const LoopCore& core, Connection& connection, const Hello& hello) {
  if (!connection.shared || hello.place != core.self.place || !may_be_of(hello, connection)) return nullptr;
  PeerState& peer = *connection.peer;
  PeerProcess& process = peer.process;
  if (!process.holder)
    process.holder = std::make_shared<Holder>(static_cast<pid_t>(hello.process), hello.began);
  // A caller sends the link's memory first.
  const std::vector<base::Fd>& descriptors = connection.handshake->descriptors_that_came;
  const std::size_t index = peer.role == Role::kListener ? 1 : 0;
  if (!process.heap && index < descriptors.size()) {
    try {
      process.heap = MappedHeap::map(descriptors[index]);
    } catch (const SystemError& error) {
      base::log_warning(
          base::concat("large messages of ", hello.name, " are copied: ", base::message_of(error)));
    }
  }
  return std::make_shared<Handles>(core.heap, process.heap, process.holder);
}

}  // namespace cohort::net::node_detail
