#include "cohort/net/internal/loop/frame_io.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/secret.h"
#include "cohort/net/internal/inbox.h"
#include "tests/net/recorder.h"

namespace cohort::net::node_detail {
namespace {

struct FakePeer final : PeerState {
  FakePeer(Role as, int& num_wakes) : PeerState(as, {}, allocate_aligned, [&num_wakes] { ++num_wakes; }) {}
  std::uint64_t send(Message message) override { return session.send(std::move(message)); }
  bool replace(std::uint64_t message, Message& other) override { return session.replace(message, other); }
  std::string transport() const override { return "nothing"; }
  PeerMetrics metrics() const override { return counts; }
  bool is_down() const override { return session.ended().has_value(); }
  void poll_until(const std::function<bool()>&) override {}
};

// One side of a link that is up: what a node has for it, without a thread.
struct LinkSide {
  LinkSide(Role role, base::Fd fd) : peer(std::make_shared<FakePeer>(role, num_wakes)) {
    connection = std::make_shared<Connection>(std::move(fd));
    connection->handshake.emplace(Handshake(role, std::nullopt, base::random_word()), role, Time::max());
    table.add(connection);
    table.end_handshake(*connection);
    connection->handshake.reset();
    connection->peer = peer;
    peer->connection = connection;
    peer->session.link_up(0, now);
    table.update_interest(*connection);
  }
  ~LinkSide() { peer->connection.reset(); }
  std::vector<Message> take() {
    std::unique_lock lock(node.mutex);
    hand_over.run(lock);
    return heard->take();
  }

  const Time now = Time::clock::now();
  int num_wakes = 0;
  NodeLock node;
  std::shared_ptr<test::Recorder> heard = std::make_shared<test::Recorder>();
  HandOver hand_over{node, heard, [] {}};
  ConnectionTable table;
  FrameIo frames{table, hand_over};
  std::shared_ptr<FakePeer> peer;
  std::shared_ptr<Connection> connection;
};

// Reads what is there now.
ReadResult read_once(LinkSide& side) {
  if (side.connection->shared) return {side.frames.read_ring(*side.connection, side.now), std::nullopt};
  return side.frames.read_socket(*side.connection, side.now);
}

// Whether the link has a ring.
class FrameIoTest : public testing::TestWithParam<bool> {
 protected:
  FrameIoTest() {
    std::array<int, 2> fds{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
    caller.emplace(Role::kCaller, base::Fd(fds[0]));
    listener.emplace(Role::kListener, base::Fd(fds[1]));
    if (!GetParam()) return;
    base::SharedMemory memory = SharedLink::make_memory();
    const base::Fd fd(::dup(memory.fd()));
    caller->connection->shared = std::make_unique<SharedLink>(std::move(memory), Role::kCaller);
    listener->connection->shared = std::make_unique<SharedLink>(SharedLink::map_memory(fd), Role::kListener);
  }

  std::optional<LinkSide> caller, listener;
};

TEST_P(FrameIoTest, MessagesComeWholeWhateverTheirSizes) {
  std::vector<Message> messages;
  for (int i = 0; i < 30; ++i) {
    caller->peer->send(test::message_of(0, std::to_string(i), i % 10 == 0 ? 700'000 : 100));
    for (int turn = 0; turn < 200 && caller->peer->session.wants_to_write(); ++turn) {
      caller->connection->waits_to_write = false;
      caller->frames.flush(*caller->peer);
      while (read_once(*listener).may_have_more) {
      }
    }
    for (Message& message : listener->take()) messages.push_back(std::move(message));
  }
  test::expect_whole(messages, 30);
  EXPECT_EQ(listener->peer->counts.messages_received, 30U);
  EXPECT_EQ(listener->peer->counts.bytes_received, caller->peer->counts.bytes_sent);
}

TEST_P(FrameIoTest, NothingToReadIsNoError) {
  const ReadResult result = read_once(*listener);
  EXPECT_FALSE(result.may_have_more);
  EXPECT_FALSE(result.error);
}

TEST_P(FrameIoTest, WhatTheLinkDoesNotTakeIsWrittenOnceItHasRoom) {
  caller->peer->send(test::message_of(0, "0", 3'000'000));
  for (int turn = 0; turn < 100 && !caller->connection->waits_to_write; ++turn) {
    caller->frames.flush(*caller->peer);
  }
  ASSERT_TRUE(caller->connection->waits_to_write);
  EXPECT_EQ(caller->connection->interest.writes, !GetParam()) << "of a ring a wake-up comes";
  const std::uint64_t sent = caller->peer->counts.bytes_sent;
  while (read_once(*listener).may_have_more) {
  }
  caller->frames.flush(*caller->peer);
  EXPECT_EQ(caller->peer->counts.bytes_sent, sent) << "nothing is tried before there is room";
  if (GetParam()) {
    EXPECT_FALSE(caller->frames.read_wakeups(*caller->connection, caller->now));
    EXPECT_FALSE(caller->connection->waits_to_write) << "the reader has sent a wake-up";
  } else {
    EXPECT_TRUE(caller->table.next_ready().is_writable);
  }
}

TEST_P(FrameIoTest, AnEndComesAfterWhatWasSentBeforeIt) {
  caller->peer->send(test::message_of(0, "0", 100));
  caller->frames.flush(*caller->peer);
  caller->table.close(*caller->connection);
  std::optional<std::string> error;
  if (GetParam()) {
    error = listener->frames.read_wakeups(*listener->connection, listener->now);
  } else {
    EXPECT_FALSE(read_once(*listener).error);
    error = read_once(*listener).error;
  }
  EXPECT_EQ(error, "the connection was closed");
  EXPECT_FALSE(listener->connection->is_closed) << "the caller of FrameIo closes it";
  test::expect_whole(listener->take(), 1);
}

TEST_P(FrameIoTest, AConnectionInItsHandshakeOrClosedTakesNoFrames) {
  caller->peer->send(test::message_of(0, "0", 100));
  caller->table.close(*caller->connection);
  caller->frames.flush(*caller->peer);
  EXPECT_EQ(caller->peer->counts.bytes_sent, 0U);
  listener->peer->send(test::message_of(0, "0", 100));
  listener->connection->handshake.emplace(Handshake(Role::kListener, std::nullopt, base::random_word()),
                                          Role::kListener, Time::max());
  listener->frames.flush(*listener->peer);
  EXPECT_EQ(listener->peer->counts.bytes_sent, 0U);
}

INSTANTIATE_TEST_SUITE_P(Links, FrameIoTest, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "SharedMemory" : "Socket");
});

// Others want the mutex while a long message is written.
TEST(FrameFlushTest, OneFlushWritesAPartOfALongMessageAndLeavesTheRest) {
  std::array<int, 2> fds{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
  const int room = 212'992;  // what Linux gives at least; it counts twice
  ASSERT_EQ(::setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
  const base::Fd other_end(fds[1]);
  LinkSide side(Role::kCaller, base::Fd(fds[0]));
  side.peer->send(test::message_of(0, "0", 3'000'000));
  side.frames.flush(*side.peer);
  EXPECT_EQ(side.num_wakes, 1);
  EXPECT_FALSE(side.connection->waits_to_write) << "the socket takes more";
  EXPECT_GE(side.peer->counts.bytes_sent, 256U * 1024);
  EXPECT_LT(side.peer->counts.bytes_sent, 600U * 1024);
}

}  // namespace
}  // namespace cohort::net::node_detail
