#include "cohort/membership/rank_link.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::membership {
namespace {

using test::patience;

base::Deadline no_time() {
  return base::Deadline(std::chrono::milliseconds(0));
}

RankOrder some_order() {
  RankOrder order;
  order.number = 31;
  order.revision = 12;
  order.origin = "agent 1";
  order.generation = {7, true, {{1, "a", "n1:1", 2}, {4, "b\n", "n2:1", 1}}, 24, 1'234, "n1:4711", "joins"};
  order.process = 2;
  order.is_leaving = order.has_ended = true;
  order.stop_signal = 15;
  order.end_cause = "\xc3\xa9 \"end\"";
  return order;
}

TEST(RankTextTest, AnOrderIsReadAsItWasWritten) {
  RankOrder order = some_order();
  EXPECT_EQ(parse_rank_order(to_text(order)), order);
  order.process.reset();
  order.has_succeeded = true;
  EXPECT_EQ(parse_rank_order(to_text(order)), order);
  EXPECT_EQ(parse_rank_order(to_text(RankOrder{})), RankOrder{});
}

TEST(RankTextTest, AStatusIsReadAsItWasWritten) {
  RankStatus status;
  status.is_ready = status.is_state_lost = true;
  status.timeout_ms = 600'000;
  status.stop_signal = 2;
  status.heard = 9;
  status.entered = 7;
  status.recovered = 6;
  status.left = 8;
  status.stepped = 5;
  status.state_bytes = 1'000'000;
  status.is_waiting = true;
  status.committed_steps = std::uint64_t{1} << 60;
  status.lost_links = {3, 9};
  EXPECT_EQ(parse_rank_status(to_text(status)), status);
  status.is_finished = true;
  EXPECT_EQ(parse_rank_status(to_text(status)), status);
}

TEST(RankTextTest, WhatIsNoOrderIsRejectedByItsField) {
  nlohmann::json order = nlohmann::json::parse(to_text(some_order()));
  const auto rejects = [&](const char* key, const nlohmann::json& value, const char* part) {
    nlohmann::json changed = order;
    changed[key] = value;
    COHORT_EXPECT_THROW_WITH(parse_rank_order(changed.dump()), CommError, part);
  };
  rejects("cohort_rank_order", 1, "has version 1, expected 4");
  rejects("origin", 7, "origin is not a text");
  rejects("process", 3, "process is not the number of a process");
  rejects("process", -1, "process is not the number of a process");
  rejects("revision", -1, "revision is not");
  rejects("more", 1, "unknown field");
  order.erase("ended");
  COHORT_EXPECT_THROW_WITH(parse_rank_order(order.dump()), CommError, "has no ended");
  COHORT_EXPECT_THROW_WITH(parse_rank_status("{"), CommError, "no JSON");
  nlohmann::json status = nlohmann::json::parse(to_text(RankStatus{}));
  status["lost_links"] = {"a"};
  COHORT_EXPECT_THROW_WITH(parse_rank_status(status.dump()), CommError, "lost_links is not a list of ids");
}

TEST(RankLinkTest, TextsArriveWholeInBothDirections) {
  auto [agent, rank] = RankLink::make_pair();
  const std::string longer(200'000, 'x');
  std::thread sender([&agent = agent, &longer] {
    EXPECT_TRUE(agent.send("first", patience()));
    EXPECT_TRUE(agent.send(longer, patience()));
  });
  EXPECT_EQ(rank.receive(patience()), "first");
  EXPECT_EQ(rank.receive(patience()), longer);
  sender.join();
  EXPECT_TRUE(rank.send("back", patience()));
  EXPECT_EQ(agent.receive(patience()), "back");
  EXPECT_EQ(agent.receive(no_time()), std::nullopt);
}

TEST(RankLinkTest, ANewerTextTakesThePlaceOfOneThatHasNotBegun) {
  auto [agent, rank] = RankLink::make_pair();
  const std::string longest(4'000'000, 'x');
  EXPECT_FALSE(agent.send(longest, no_time()));
  EXPECT_FALSE(agent.send("second", no_time()));
  EXPECT_FALSE(agent.send("third", no_time()));
  EXPECT_TRUE(agent.has_unsent());
  std::thread sender([&agent = agent] { EXPECT_TRUE(agent.flush(patience())); });
  EXPECT_EQ(rank.receive(patience()), longest);
  EXPECT_EQ(rank.receive(patience()), "third");
  sender.join();
  EXPECT_FALSE(agent.has_unsent());
}

TEST(RankLinkTest, ADescriptorArrivesBeforeTheTextsAfterIt) {
  auto [agent, rank] = RankLink::make_pair();
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const base::Fd read_end(pipe[0]);
  base::Fd write_end(pipe[1]);
  EXPECT_TRUE(agent.send_file(write_end, patience()));
  write_end.close();
  EXPECT_EQ(rank.receive(no_time()), std::nullopt);
  EXPECT_TRUE(agent.send("text", patience()));
  EXPECT_EQ(rank.receive(patience()), "text");
  const base::Fd file = rank.take_file();
  ASSERT_TRUE(file.is_open());
  EXPECT_FALSE(rank.take_file().is_open());
  EXPECT_EQ(::fcntl(file.get(), F_GETFD), FD_CLOEXEC);
  ASSERT_EQ(::write(file.get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(::read(read_end.get(), &byte, 1), 1);
}

// A rank that reads nothing, as one that is stopped: texts take each other's place, and the descriptor stays.
TEST(RankLinkTest, ANewerTextTakesNoDescriptorsPlace) {
  auto [agent, rank] = RankLink::make_pair();
  const std::string longest(4'000'000, 'x');
  const base::Fd file(::dup(2));
  EXPECT_FALSE(agent.send(longest, no_time()));
  EXPECT_FALSE(agent.send("second", no_time()));
  EXPECT_FALSE(agent.send_file(file, no_time()));
  EXPECT_FALSE(agent.send("third", no_time()));
  EXPECT_FALSE(agent.send("fourth", no_time()));
  std::thread sender([&agent = agent] { EXPECT_TRUE(agent.flush(patience())); });
  EXPECT_EQ(rank.receive(patience()), longest);
  EXPECT_FALSE(rank.take_file().is_open());
  EXPECT_EQ(rank.receive(patience()), "fourth");
  EXPECT_TRUE(rank.take_file().is_open());
  sender.join();
}

TEST(RankLinkTest, TheOtherSidesEndIsTold) {
  auto [agent, rank] = RankLink::make_pair();
  EXPECT_TRUE(agent.send("last", patience()));
  { const RankLink ends = std::move(agent); }
  EXPECT_EQ(rank.receive(patience()), "last");
  COHORT_EXPECT_THROW_WITH(rank.receive(patience()), CommError, "is gone");
  COHORT_EXPECT_THROW_WITH(rank.send("text", patience()), CommError, "is gone");
}

TEST(RankLinkTest, ShutdownEndsAReceive) {
  auto [agent, rank] = RankLink::make_pair();
  std::thread receiver(
      [&rank = rank] { COHORT_EXPECT_THROW_WITH(rank.receive(patience()), CommError, "is gone"); });
  rank.shutdown();
  receiver.join();
  COHORT_EXPECT_THROW_WITH(agent.send("", patience()), UsageError, "expected 1 to");
}

TEST(RankLinkTest, ARankFindsItsLinkByTheEnvironment) {
  auto [agent, rank] = RankLink::make_pair();
  ASSERT_EQ(::setenv("COHORT_AGENT_FD", std::to_string(rank.fd()).c_str(), 1), 0);
  auto found = RankLink::of_process();
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->send("hello", patience()));
  EXPECT_EQ(agent.receive(patience()), "hello");
  const base::Fd file(::dup(2));
  ASSERT_EQ(::setenv("COHORT_AGENT_FD", std::to_string(file.get()).c_str(), 1), 0);
  COHORT_EXPECT_THROW_WITH(RankLink::of_process(), UsageError, "is no link to an agent");
  ASSERT_EQ(::unsetenv("COHORT_AGENT_FD"), 0);
  EXPECT_FALSE(RankLink::of_process());
}

}  // namespace
}  // namespace cohort::membership
