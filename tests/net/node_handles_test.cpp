// Nodes that pass each other memory by handle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "tests/net/recorder.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"

namespace cohort::net {
namespace {

using test::message_of;
using test::patience;
using test::Worker;

constexpr std::size_t kBlockBytes = 1 << 20;

std::string new_local_address() {
  return "unix:@cohort-" + base::random_word();
}

Message message_in_block(Node& node, int mark, const std::string& header = "block") {
  const std::shared_ptr<std::byte> block = node.allocate_shared(kBlockBytes);
  std::memset(block.get(), mark, kBlockBytes);
  Message message;
  message.header = header;
  message.payloads.push_back({block, {block.get(), kBlockBytes}, true});
  return message;
}
bool has_marks(const Message& message, int mark) {
  const auto bytes = message.payloads.at(0).bytes;
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte b) { return std::to_integer<int>(b) == mark; });
}
// An answer came, so the peer has said before that it maps the heap.
void greet(Worker& worker, Peer& peer) {
  peer.send(message_of(0, "hello"));
  test::wait_until([&] { return worker.heard->count() > 0; });
  worker.heard->take();
}
// Appends what has come. Its bytes count as used.
std::size_t take_messages(Worker& worker, std::vector<Message>& came) {
  for (Message& message : worker.heard->take()) {
    message.credit.reset();
    came.push_back(std::move(message));
  }
  return came.size();
}
// Where no other one comes meanwhile.
Message next_message(Worker& worker) {
  std::vector<Message> came;
  test::wait_until([&] { return take_messages(worker, came) > 0; });
  return std::move(came.at(0));
}

// NODE_DOES at NODE_ADDRESS.
TEST(NodeHandlesChild, DISABLED_Process) {
  const std::string does = std::getenv("NODE_DOES");
  Worker worker("child");
  const auto peer = worker.node->connect(std::getenv("NODE_ADDRESS"), patience());
  std::vector<Message> kept;
  test::wait_until([&] { return take_messages(worker, kept) == 2; });
  if (does == "answer") {  // with memory of its own, and is killed
    peer->send(message_in_block(*worker.node, 8));
    test::wait_until([&] { return peer->metrics().bytes_on_the_way == 0; });
  }
  std::puts("done");
  std::fflush(stdout);
  base::sleep(std::chrono::seconds(60), patience());
}
test::RankProcesses node_child(const std::string& does, const std::string& address) {
  return test::RankProcesses("NodeHandlesChild", 1, {{"NODE_DOES", does}, {"NODE_ADDRESS", address}});
}

TEST(NodeHandlesTest, AnEchoComesBackInTheSameMemory) {
  Worker a("a"), b("b", {}, true);
  const auto peer = a.node->connect(b.node->listen(new_local_address()), patience());
  greet(a, *peer);
  Message message = message_in_block(*a.node, 5);
  const std::byte* const was = message.payloads[0].bytes.data();
  const std::uint64_t before = peer->metrics().bytes_sent;
  peer->send(std::move(message));
  for (int i = 0; i < 20; ++i) {
    Message came = next_message(a);
    ASSERT_EQ(came.payloads.at(0).bytes.data(), was) << i;
    ASSERT_TRUE(came.payloads[0].moves);
    peer->send(std::move(came));
  }
  EXPECT_LT(peer->metrics().bytes_sent - before, 10'000U);
  EXPECT_GE(peer->metrics().bytes_by_handle, 20 * kBlockBytes);
  EXPECT_EQ(a.node->shared_metrics().bytes_in_use, kBlockBytes);
  EXPECT_EQ(b.node->shared_metrics().bytes_in_use, 0U);
  next_message(a);
  EXPECT_TRUE(test::comes_true([&] { return a.node->shared_metrics().bytes_in_use == 0; }));
}

TEST(NodeHandlesTest, ALongPayloadOfOtherMemoryIsCopiedOnce) {
  Worker a("a"), b("b");
  const auto peer = a.node->connect(b.node->listen(new_local_address()), patience());
  const auto back = b.heard->peer();
  test::wait_until([&] {  // until each side knows that the other one maps its heap
    peer->send(message_of(0, "", kBlockBytes));
    back->send(message_of(0, "", kBlockBytes));
    const Message to_b = next_message(b), to_a = next_message(a);
    for (const Message* message : {&to_a, &to_b}) {
      const Message sent = message_of(0, "", kBlockBytes);
      EXPECT_EQ(std::memcmp(message->payloads[0].bytes.data(), sent.payloads[0].bytes.data(), kBlockBytes),
                0);
    }
    return to_a.payloads[0].moves && to_b.payloads[0].moves;
  });
  peer->send(message_of(0, "", kLeastBytesByHandle - 1));
  EXPECT_FALSE(next_message(b).payloads[0].moves);
}

TEST(NodeHandlesTest, MemoryOfOnePeerIsCopiedToAnother) {
  Worker a("a"), b("b"), c("c");
  const auto b_of_a = a.node->connect(b.node->listen(new_local_address()), patience());
  const auto c_of_b = b.node->connect(c.node->listen(new_local_address()), patience());
  test::wait_until([&] {
    b_of_a->send(message_in_block(*a.node, 4));
    Message message = next_message(b);
    const bool is_by_handle = message.payloads[0].moves;
    c_of_b->send(std::move(message));
    EXPECT_TRUE(has_marks(next_message(c), 4));
    return is_by_handle;
  });
  EXPECT_TRUE(test::comes_true([&] { return a.node->shared_metrics().bytes_in_use == 0; }));
}

TEST(NodeHandlesTest, CopiesStopWhereTheCacheIsFullAndMessagesDoNot) {
  NodeOptions options;
  options.shared_cache = 4 * kBlockBytes;
  Worker a("a", options), b("b", {}, true);
  const auto peer = a.node->connect(b.node->listen(new_local_address()), patience());
  greet(a, *peer);
  for (int i = 0; i < 30; ++i) peer->send(message_of(0, std::to_string(i), kBlockBytes));
  std::vector<Message> came;
  EXPECT_TRUE(test::comes_true([&] {
    EXPECT_LE(a.node->shared_metrics().bytes_in_use, options.shared_cache);
    return take_messages(a, came) == 30;
  }));
  ASSERT_EQ(came.size(), 30U);
  const Message sent = message_of(0, "", kBlockBytes);
  for (const Message& message : came) {
    EXPECT_EQ(std::memcmp(message.payloads[0].bytes.data(), sent.payloads[0].bytes.data(), kBlockBytes), 0);
  }
}

TEST(NodeHandlesTest, BrokenLinksLoseAndRepeatNothing) {
  Worker a("a"), b("b", {}, true);
  const auto peer = a.node->connect(b.node->listen(new_local_address()), patience());
  greet(a, *peer);
  constexpr int kMessages = 200;
  std::vector<Message> came;
  for (int i = 0; i < kMessages; ++i) {
    peer->send(message_in_block(*a.node, i % 200, std::to_string(i)));
    if (i % 40 == 39) {
      for (const int fd : test::connected_sockets()) ::shutdown(fd, SHUT_RDWR);
    }
    test::wait_until([&] { return take_messages(a, came) + 30 > static_cast<std::size_t>(i); });
  }
  ASSERT_TRUE(test::comes_true([&] { return take_messages(a, came) == kMessages; })) << came.size();
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_EQ(came[static_cast<std::size_t>(i)].header, std::to_string(i));
    EXPECT_TRUE(has_marks(came[static_cast<std::size_t>(i)], i % 200)) << i;
  }
  EXPECT_GT(peer->metrics().links, 2);
  came.clear();
  EXPECT_TRUE(test::comes_true(
      [&] { return a.node->shared_metrics().bytes_in_use + b.node->shared_metrics().bytes_in_use == 0; }));
}

TEST(NodeHandlesTest, AKilledProcessGivesItsBlocksBackAndLeavesItsMemory) {
  Worker a("a");
  auto processes = node_child("answer", a.node->listen(new_local_address()));
  const auto peer = a.heard->peer();
  for (int i = 0; i < 2; ++i) peer->send(message_in_block(*a.node, i));
  const Message answer = next_message(a);
  processes.wait_for(0, "done");
  // The first one was copied if the other side had not said yet that it maps the memory.
  EXPECT_GE(a.node->shared_metrics().bytes_in_use, kBlockBytes) << processes.output(0);
  processes.send(0, SIGKILL);
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_TRUE(test::comes_true([&] { return a.node->shared_metrics().bytes_in_use == 0; }));
  EXPECT_TRUE(has_marks(answer, 8));
}

TEST(NodeHandlesTest, MemoryOutlivesTheNodesOfBothSides) {
  std::optional<Worker> a, b;
  a.emplace("a");
  b.emplace("b");
  const auto peer = a->node->connect(b->node->listen(new_local_address()), patience());
  Message message;
  test::wait_until([&] {
    peer->send(message_in_block(*a->node, 6));
    message = next_message(*b);
    return message.payloads[0].moves;
  });
  const std::shared_ptr<std::byte> own = a->node->allocate_shared(kBlockBytes);
  a.reset();
  b.reset();
  EXPECT_TRUE(has_marks(message, 6));
  std::memset(own.get(), 1, kBlockBytes);
}

TEST(NodeHandlesTest, WithoutSharedMemoryBlocksAreOrdinaryMemory) {
  NodeOptions options;
  options.shared_memory = false;
  Worker a("a", options), b("b", {}, true);
  const auto peer = a.node->connect(b.node->listen(new_local_address()), patience());
  greet(a, *peer);
  peer->send(message_in_block(*a.node, 2));
  const Message came = next_message(a);
  EXPECT_TRUE(has_marks(came, 2));
  EXPECT_FALSE(came.payloads[0].moves);
  EXPECT_EQ(a.node->shared_metrics().bytes_in_use, 0U);
}

}  // namespace
}  // namespace cohort::net
