#include "cohort/net/internal/loop/connection_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/loop/peer_state.h"
#include "tests/support/throws.h"

namespace cohort::net::node_detail {
namespace {

// A connection of the table, and the other end of its socket.
struct Ends {
  explicit Ends(ConnectionTable& table, Role role = Role::kListener) {
    std::array<int, 2> fds{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
    connection = std::make_shared<Connection>(base::Fd(fds[0]));
    other_end = base::Fd(fds[1]);
    connection->handshake.emplace(Handshake(role, std::nullopt, base::random_word()), role, Time::max());
    table.add(connection);
  }
  // Without its handshake.
  void open(ConnectionTable& table) const {
    table.end_handshake(*connection);
    connection->handshake.reset();
    table.update_interest(*connection);
  }
  void send() const { ASSERT_EQ(::write(other_end.get(), "x", 1), 1); }

  std::shared_ptr<Connection> connection;
  base::Fd other_end;
};

TEST(ConnectionTableTest, AConnectionIsReadyUntilItIsClosed) {
  ConnectionTable table;
  const base::Fd readiness = table.readiness();
  Ends a(table), b(table);
  EXPECT_FALSE(table.next_ready().connection);
  b.send();
  EXPECT_NE(base::ready_events(readiness.get(), POLLIN) & POLLIN, 0);
  const ConnectionTable::Ready ready = table.next_ready();
  EXPECT_EQ(ready.connection, b.connection);
  EXPECT_TRUE(ready.is_readable);
  EXPECT_FALSE(ready.is_writable);
  table.close(*b.connection);
  EXPECT_TRUE(b.connection->is_closed);
  EXPECT_FALSE(b.connection->socket.is_open());
  EXPECT_FALSE(table.next_ready().connection);
  EXPECT_EQ(b.connection.use_count(), 2) << "this test, and `ready`: the table has it no more";
  table.close(*b.connection);
  table.update_interest(*b.connection);
  a.send();
  EXPECT_EQ(table.next_ready().connection, a.connection);
}

TEST(ConnectionTableTest, AConnectionThatThePollerDoesNotTakeChangesNothing) {
  ConnectionTable table;
  const Ends ends(table);
  const base::Fd folder(::open("/", O_RDONLY | O_CLOEXEC));  // epoll takes no folder
  ASSERT_TRUE(folder.is_open());
  const auto connection = std::make_shared<Connection>(base::Fd(::dup(folder.get())));
  connection->handshake.emplace(Handshake(Role::kListener, std::nullopt, base::random_word()),
                                Role::kListener, Time::max());
  COHORT_EXPECT_THROW_WITH(table.add(connection), SystemError, "a socket cannot be added");
  EXPECT_EQ(connection.use_count(), 1) << "the table does not have it";
  EXPECT_EQ(table.handshakes().size(), 1U);
  EXPECT_FALSE(connection->is_closed);
  EXPECT_TRUE(connection->socket.is_open());
  ends.send();
  EXPECT_EQ(table.next_ready().connection, ends.connection);
}

TEST(ConnectionTableTest, ACallersSocketIsWritableOnceItIsConnected) {
  ConnectionTable table;
  const Ends ends(table, Role::kCaller);
  ends.send();
  const ConnectionTable::Ready ready = table.next_ready();
  EXPECT_EQ(ready.connection, ends.connection);
  EXPECT_TRUE(ready.is_writable);
  EXPECT_FALSE(ready.is_readable) << "nothing is read before";
  ends.connection->handshake->is_connecting = false;
  table.update_interest(*ends.connection);
  EXPECT_TRUE(table.next_ready().is_readable);
}

TEST(ConnectionTableTest, AConnectionIsAskedForWhatItWaitsFor) {
  ConnectionTable table;
  const Ends ends(table);
  ends.open(table);
  ends.send();
  ends.connection->num_pollers = 1;  // a thread reads the socket itself
  table.update_interest(*ends.connection);
  EXPECT_FALSE(table.next_ready().connection);
  table.wait_to_write(*ends.connection);
  EXPECT_TRUE(table.next_ready().is_writable);
  ends.connection->shared = std::make_unique<SharedLink>(SharedLink::make_memory(), Role::kCaller);
  table.update_interest(*ends.connection);
  const ConnectionTable::Ready ready = table.next_ready();
  EXPECT_TRUE(ready.is_readable) << "wake-ups come over the socket of a ring, whoever looks at the ring";
  EXPECT_FALSE(ready.is_writable);
}

TEST(ConnectionTableTest, HandshakesAreThoseThatAreNotDoneTheOldestFirst) {
  ConnectionTable table;
  Ends a(table), b(table), c(table), d(table);
  a.open(table);
  table.close(*c.connection);
  ASSERT_EQ(table.handshakes().size(), 2U);
  EXPECT_EQ(table.handshakes().front(), b.connection);
  EXPECT_EQ(table.handshakes().back(), d.connection);
  const std::weak_ptr<Connection> only_in_table = b.connection;
  b.connection.reset();
  table.close_handshakes();
  EXPECT_TRUE(table.handshakes().empty());
  EXPECT_TRUE(only_in_table.expired());
  EXPECT_TRUE(d.connection->is_closed);
  EXPECT_FALSE(a.connection->is_closed);
}

}  // namespace
}  // namespace cohort::net::node_detail
