#include "cohort/net/internal/loop/active_links.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "cohort/base/secret.h"
#include "cohort/net/internal/loop/peer_state.h"

namespace cohort::net::node_detail {
namespace {

// A ring, and what its peer has of it.
struct Ring {
  Ring() {
    base::SharedMemory memory = SharedLink::make_memory();
    const base::Fd fd(::dup(memory.fd()));
    peer = std::make_unique<SharedLink>(std::move(memory), Role::kCaller);
    connection->shared = std::make_unique<SharedLink>(SharedLink::map_memory(fd), Role::kListener);
  }
  // Whether the peer, which writes a byte, has to send a wake-up.
  bool write() {
    char byte = 'x';
    const iovec part{&byte, 1};
    EXPECT_EQ(peer->writer().write({&part, 1}), 1U);
    return peer->writer().take_wakeup();
  }
  void read() {
    RingReader& reader = connection->shared->reader();
    reader.consume(reader.peek().size());
  }

  std::shared_ptr<Connection> connection = std::make_shared<Connection>(base::Fd());
  std::unique_ptr<SharedLink> peer;
};

TEST(ActiveLinksTest, ARingIsAwakeWhileTheNodesOwnThreadPollsIt) {
  ConnectionTable table;
  ActiveLinks active(table);
  Ring ring;
  EXPECT_FALSE(active.may_poll());
  active.keep(ring.connection);
  active.keep(ring.connection);
  EXPECT_TRUE(active.may_poll());
  EXPECT_EQ(active.rings().size(), 1U);
  EXPECT_EQ(ring.connection->num_pollers, 1);
  EXPECT_FALSE(ring.write());
  EXPECT_FALSE(active.let_all_sleep()) << "there is a byte to read";
  EXPECT_EQ(active.rings().size(), 1U);
  ring.read();
  EXPECT_TRUE(active.let_all_sleep());
  EXPECT_TRUE(active.rings().empty());
  EXPECT_EQ(ring.connection->num_pollers, 0);
  EXPECT_TRUE(ring.write());
}

TEST(ActiveLinksTest, AClosedRingSleepsWhateverIsInIt) {
  ConnectionTable table;
  ActiveLinks active(table);
  Ring ring;
  active.keep(ring.connection);
  EXPECT_FALSE(ring.write());
  ring.connection->is_closed = true;
  EXPECT_TRUE(active.let_all_sleep());
}

TEST(ActiveLinksTest, TheNodesOwnThreadDoesNotPollWhileAnotherWaits) {
  ConnectionTable table;
  ActiveLinks active(table);
  Ring ring;
  active.keep_sockets();
  EXPECT_TRUE(active.may_poll());
  active.begin_polling(*ring.connection);
  EXPECT_FALSE(active.may_poll());
  EXPECT_FALSE(active.end_polling(ring.connection));
  EXPECT_TRUE(active.may_poll());
  EXPECT_TRUE(active.let_all_sleep());
  EXPECT_FALSE(active.polls_sockets());
  EXPECT_FALSE(active.may_poll());
}

TEST(ActiveLinksTest, TheLastThreadThatStopsPollingPutsTheRingToSleep) {
  ConnectionTable table;
  ActiveLinks active(table);
  Ring ring;
  active.begin_polling(*ring.connection);
  active.begin_polling(*ring.connection);
  EXPECT_FALSE(active.end_polling(ring.connection));
  EXPECT_FALSE(ring.write()) << "a thread polls yet";
  ring.read();
  EXPECT_FALSE(active.end_polling(ring.connection));
  EXPECT_TRUE(ring.write());
}

TEST(ActiveLinksTest, WhatAThreadLeavesInARingIsForTheNodesOwn) {
  ConnectionTable table;
  ActiveLinks active(table);
  Ring ring;
  active.begin_polling(*ring.connection);
  EXPECT_FALSE(ring.write());
  EXPECT_TRUE(active.end_polling(ring.connection));
  EXPECT_EQ(active.rings().size(), 1U);
  EXPECT_EQ(ring.connection->num_pollers, 1);
  EXPECT_TRUE(active.may_poll());
}

TEST(ActiveLinksTest, ASocketThatAThreadReadsIsNotInThePoller) {
  ConnectionTable table;
  ActiveLinks active(table);
  std::array<int, 2> fds{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
  const base::Fd other_end(fds[1]);
  const auto connection = std::make_shared<Connection>(base::Fd(fds[0]));
  connection->handshake.emplace(Handshake(Role::kListener, std::nullopt, base::random_word()),
                                Role::kListener, Time::max());
  table.add(connection);
  table.end_handshake(*connection);
  connection->handshake.reset();
  ASSERT_EQ(::write(other_end.get(), "x", 1), 1);
  active.begin_polling(*connection);
  EXPECT_FALSE(table.next_ready().connection);
  EXPECT_FALSE(active.end_polling(connection));
  EXPECT_EQ(table.next_ready().connection, connection);
}

}  // namespace
}  // namespace cohort::net::node_detail
