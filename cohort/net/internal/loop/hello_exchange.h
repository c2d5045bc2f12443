#pragma once

#include <memory>

#include "cohort/net/internal/handles.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/loop/connection.h"
#include "cohort/net/internal/loop/loop_core.h"

/// What the two hellos of a handshake say, and the descriptors that go with them. Threads: under the mutex of
/// NodeLock.
namespace cohort::net::node_detail {

/// This process's hello for the peer of a connection in its handshake. Of a local socket: makes `shared`,
/// whose memory a caller sends with the hello, and the heap's descriptor follows.
Hello own_hello(const LoopCore& core, Connection& connection);

/// Whether the kernel does not say that another process is at the other end than the hello says, as where
/// bytes are passed on. Then that process's end is not this peer's, and it has no handles.
bool may_be_of(const Hello& hello, const Connection& connection);

/// The answer of a listener that does not know the session.
Hello hello_without_session(const LoopCore& core);

/// By which payloads go over a connection after its handshake; maps the peer's heap once. Null where none
/// goes by handle.
std::shared_ptr<const Handles> handles_for(const LoopCore& core, Connection& connection, const Hello& hello);

}  // namespace cohort::net::node_detail
