// Agents that exchange words through a map instead of a store.
#include "cohort/launch/peers.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>

#include "cohort/core/error.h"
#include "cohort/launch/meeting.h"
#include "tests/support/map_board.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using test::MapBoard;

bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) ::poll(nullptr, 0, 10);
  return condition();
}

PeersOptions quick(int node, int nnodes) {
  return {.node = node,
          .nnodes = nnodes,
          .interval = milliseconds(5),
          .keep_alive_interval = milliseconds(50),
          .keep_alive_max_attempt = 10};
}

TEST(PeersTest, WhatOnePostsTheOtherReceives) {
  const auto board = std::make_shared<MapBoard>();
  Peers first(board, quick(0, 2)), second(board, quick(1, 2));
  second.watch("word");
  EXPECT_FALSE(second.received("word"));
  first.post("word", "said");
  pollfd wait{second.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&wait, 1, 10'000), 1) << "news ring";
  EXPECT_EQ(second.received("word"), "said");
  EXPECT_EQ(first.lost() + second.lost(), "");
}

TEST(PeersTest, WhatWasPostedIsWrittenBeforeItGoes) {
  const auto board = std::make_shared<MapBoard>();
  { Peers(board, quick(0, 1)).post("last", "word"); }
  EXPECT_EQ(board->get("last"), "word");
}

TEST(PeersTest, ANodeThatGivesNoSignIsNamed) {
  const auto board = std::make_shared<MapBoard>();
  Peers first(board, quick(0, 3));
  Peers second(board, quick(1, 3));
  EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
  EXPECT_NE(first.lost().find("node 2 has given no sign for 0 s"), std::string::npos) << first.lost();
  EXPECT_EQ(second.lost(), "") << "it looks at node 0 only";
}

TEST(PeersTest, ABoardThatBreaksOrHangsIsLost) {
  const auto broken = std::make_shared<MapBoard>();
  Peers first(broken, quick(1, 2));
  broken->break_it("connection reset\nException raised from recvBytes at Utils.hpp:680");
  EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
  EXPECT_EQ(first.lost(), "the store that node 0 keeps is gone: connection reset");

  const auto hanging = std::make_shared<MapBoard>();
  const auto release = hanging->hang();
  Peers second(hanging, quick(1, 2));
  EXPECT_TRUE(comes_true([&] { return !second.lost().empty(); }));
  EXPECT_EQ(second.lost().find("the store that node 0 keeps has not answered for"), 0u) << second.lost();
}

RunOptions nodes(int node, int nnodes, int nproc) {
  RunOptions options;
  options.command = {"true"};
  options.nnodes = nnodes;
  options.node_rank = node;
  options.nproc_per_node = nproc;
  options.master_addr = "127.0.0.1";
  options.run_id = "job";
  return options;
}

TEST(MeetingTest, NodesLearnWhichRanksTheyHave) {
  const auto board = std::make_shared<MapBoard>();
  Peers first(board, quick(0, 2)), second(board, quick(1, 2));
  board->set("here/1", R"({"creed": "", "nproc": 3, "reached": "192.0.2.7"})");
  SignalInbox signals({}, {});
  int signal = 0;
  // Node 1 is played by the line above, but for what it must agree on.
  COHORT_EXPECT_THROW_WITH(
      meet(nodes(0, 2, 2), first, signals, "", core::Deadline(milliseconds(5000)), signal), RendezvousError,
      "nodes disagree: node 0 has --nnodes 2, --rdzv-id job");
  COHORT_EXPECT_THROW_WITH(
      meet(nodes(1, 2, 3), second, signals, "192.0.2.7", core::Deadline(milliseconds(5000)), signal),
      RendezvousError, "nodes disagree");
}

TEST(MeetingTest, ThoseThatDidNotComeAreNamed) {
  const auto board = std::make_shared<MapBoard>();
  Peers first(board, quick(0, 4));
  board->set("here/2", "{}");
  SignalInbox signals({}, {});
  int signal = 0;
  COHORT_EXPECT_THROW_WITH(
      meet(nodes(0, 4, 1), first, signals, "", core::Deadline(milliseconds(300)), signal), RendezvousError,
      "nodes 1 and 3 of 4 did not come within ");
  EXPECT_TRUE(comes_true([&] { return board->has("go"); })) << "who came is told";
  EXPECT_NE(board->get("go").find("nodes 1 and 3 of 4 did not come"), std::string::npos);
}

TEST(MeetingTest, ASignalEndsTheWait) {
  const auto board = std::make_shared<MapBoard>();
  Peers first(board, quick(0, 2));
  SignalInbox signals({SIGTERM}, {SIGUSR1});
  ::raise(SIGUSR1);
  ::raise(SIGTERM);
  int signal = 0;
  EXPECT_FALSE(meet(nodes(0, 2, 1), first, signals, "", core::Deadline(milliseconds(10'000)), signal));
  EXPECT_EQ(signal, SIGTERM);
}

}  // namespace
}  // namespace cohort::launch
