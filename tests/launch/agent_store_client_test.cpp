// Agents that exchange words through a map instead of a store.
#include "cohort/launch/internal/agent_store_client.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "cohort/base/error.h"
#include "tests/launch/quick_store_client.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using test::MapStore;

TEST(AgentStoreClientTest, WhatOnePostsTheOtherReceives) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, quick(0, 2)), second(kv_store, quick(1, 2));
  second.watch("word");
  EXPECT_FALSE(second.received("word"));
  first.post("word", "said");
  pollfd wait{second.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&wait, 1, 10'000), 1) << "no wake-up";
  EXPECT_EQ(second.received("word"), "said");
  EXPECT_EQ(first.lost() + second.lost(), "");
}

TEST(AgentStoreClientTest, WhatWasPostedIsWrittenBeforeItGoes) {
  const auto kv_store = std::make_shared<MapStore>();
  {
    AgentStoreClient store_client(kv_store, quick(0, 1));
    store_client.set_last_words_time(std::chrono::seconds(20));
    store_client.post("last", "word");
  }
  EXPECT_EQ(kv_store->get("last"), "word");
}

TEST(AgentStoreClientTest, ANodeThatGivesNoSignAnyMoreIsNamed) {
  const auto kv_store = std::make_shared<MapStore>();
  kv_store->set("alive/2", "1");
  AgentStoreClient first(kv_store, hasty(0, 3));
  AgentStoreClient second(kv_store, hasty(1, 3));
  for (AgentStoreClient* store_client : {&first, &second}) {
    store_client->busy_until(base::Deadline(std::chrono::minutes(1)));  // signs do not wait for this thread
    store_client->begin_session("this");
  }
  EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
  EXPECT_EQ(first.lost().find("node 2 has given no sign for "), 0u) << first.lost();
  EXPECT_TRUE(first.is_lost(2));
  EXPECT_FALSE(first.is_lost(0));
  EXPECT_EQ(second.lost(), "") << "it looks at node 0 only";
}

// By a clock that runs minutes in a moment.
TEST(AgentStoreClientTest, ANodeThatHasNotComeYetIsNotLost) {
  const auto kv_store = std::make_shared<MapStore>();
  // Threads of agents share it, and may outlive the test.
  const auto clock = std::make_shared<std::atomic<std::int64_t>>(0);
  std::atomic<std::int64_t>& seconds = *clock;
  AgentStoreClientOptions options = quick(0, 2);
  options.keep_alive_interval = std::chrono::seconds(5);
  options.keep_alive_max_attempt = 3;
  const auto start = std::chrono::steady_clock::now();
  options.now = [clock, start] { return start + std::chrono::seconds(clock->load()); };
  AgentStoreClient first(kv_store, options);
  first.begin_session("this");
  // Lets `time` pass, in which all of `agents`, of node 0 and so on, give a sign.
  const auto pass = [&](std::int64_t time, const std::vector<AgentStoreClient*>& agents) {
    std::vector<std::string> before;
    const auto sign = [&](std::size_t node) {
      const std::string key = base::concat("alive/", node);
      return kv_store->has(key) ? kv_store->get(key) : "";
    };
    for (std::size_t node = 0; node < agents.size(); ++node) {
      EXPECT_TRUE(comes_true([&] { return !sign(node).empty(); })) << "the first one";
      before.push_back(sign(node));
      agents[node]->acknowledge();
    }
    seconds += time;
    for (std::size_t node = 0; node < agents.size(); ++node) {
      EXPECT_TRUE(comes_true([&] { return sign(node) != before[node]; }));
    }
  };
  for (int minute = 0; minute < 9; ++minute) {
    pass(60, {&first});
    EXPECT_EQ(first.lost(), "") << "after " << minute << " minutes";
  }
  options.node = 1;
  AgentStoreClient late(kv_store, options);
  late.begin_session("this");
  pass(10, {&first, &late});
  for (int i = 0; i < 12; ++i) {
    pass(10, {&first, &late});
    EXPECT_EQ(first.lost() + late.lost(), "");
  }
}

// Of an interval that the user sets, and one that many nodes make long: a minute both.
TEST(AgentStoreClientTest, SignsDoNotWaitForTheIntervalOfWords) {
  for (const auto& [interval, nnodes] :
       {std::pair{milliseconds(60'000), 2}, std::pair{milliseconds(3000), 1000}}) {
    const auto kv_store = std::make_shared<MapStore>();
    AgentStoreClientOptions options = quick(0, nnodes);
    options.interval = interval;
    AgentStoreClient first(kv_store, options);
    options.node = 1;
    AgentStoreClient second(kv_store, options);
    for (AgentStoreClient* store_client : {&first, &second}) store_client->begin_session("this");
    first.expect_signs(1);
    second.expect_signs(0);
    std::set<std::string> of_first, of_second;
    EXPECT_TRUE(comes_true([&] {
      first.acknowledge();
      second.acknowledge();
      if (kv_store->has("alive/0")) of_first.insert(kv_store->get("alive/0"));
      if (kv_store->has("alive/1")) of_second.insert(kv_store->get("alive/1"));
      return of_first.size() >= 10 && of_second.size() >= 10;
    })) << interval.count()
        << " ms, " << nnodes << " nodes: " << of_first.size() << " and " << of_second.size() << " signs";
    EXPECT_EQ(first.lost() + second.lost(), "") << interval.count() << " ms, " << nnodes << " nodes";
  }
}

// Agents whose clock a test moves.
class ClockedAgentStoreClientTest : public testing::Test {
 protected:
  ClockedAgentStoreClientTest() {
    options_.keep_alive_interval = std::chrono::seconds(5);
    options_.keep_alive_max_attempt = 3;
    options_.now = [start = std::chrono::steady_clock::now(), clock = clock_] {
      return start + std::chrono::seconds(clock->load());
    };
    for (int node = 0; node < 2; ++node) {
      options_.node = node;
      agents_.push_back(std::make_unique<AgentStoreClient>(kv_store_, options_));
    }
    for (const auto& agent : agents_) agent->begin_session("this");
    agents_[0]->expect_signs(1);
    agents_[1]->expect_signs(0);
    for (int node = 0; node < 2; ++node) wait_for_sign(node, "");
    for (int i = 0; i < 2; ++i) pass(5, {0, 1});  // each has seen the other's
  }
  std::string sign_of(int node) {
    const std::string key = base::concat("alive/", node);
    return kv_store_->has(key) ? kv_store_->get(key) : "";
  }
  void wait_for_sign(int node, const std::string& before) {
    EXPECT_TRUE(comes_true([&] { return sign_of(node) != before; })) << "node " << node;
  }
  // Lets that many seconds pass in one step. The agents of `continuing` have answered the ring before.
  void pass(int seconds, std::initializer_list<int> continuing) {
    std::vector<std::string> before;
    for (const int node : continuing) {
      agents_[static_cast<std::size_t>(node)]->acknowledge();
      before.push_back(sign_of(node));
    }
    seconds_ += seconds;
    std::size_t i = 0;
    for (const int node : continuing) wait_for_sign(node, before[i++]);
  }
  std::string lost(int node) const { return agents_[static_cast<std::size_t>(node)]->lost(); }

  const std::shared_ptr<MapStore> kv_store_ = std::make_shared<MapStore>();
  // Threads of agents share it, and may outlive the test.
  const std::shared_ptr<std::atomic<int>> clock_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<int>& seconds_ = *clock_;
  AgentStoreClientOptions options_ = quick(0, 2);
  std::vector<std::unique_ptr<AgentStoreClient>> agents_;
};

TEST_F(ClockedAgentStoreClientTest, NobodyIsLostWhereAllStoodStill) {
  for (int i = 0; i < 20; ++i) {
    pass(3600, {0, 1});
    pass(5, {0, 1});
    ASSERT_EQ(lost(0) + lost(1), "") << "round " << i;
  }
}

TEST_F(ClockedAgentStoreClientTest, OneThatGivesNoSignIsLostThoughTheOtherStoodStillMeanwhile) {
  pass(3600, {0});
  EXPECT_EQ(lost(0), "");
  int num_rounds = 0;
  while (lost(0).empty() && num_rounds < 10) {
    pass(5, {0});
    ++num_rounds;
  }
  EXPECT_EQ(lost(0).find("node 1 has given no sign for"), 0u) << lost(0);
  EXPECT_LE(num_rounds, 5);
}

// The thread that gives signs is not the one that hangs.
TEST_F(ClockedAgentStoreClientTest, ANodeWhoseAgentHangsIsLostThoughItsThreadContinues) {
  for (int i = 0; i < 8; ++i) {
    pass(5, {0, 1});
    ASSERT_EQ(lost(0) + lost(1), "") << "both agents continue";
  }
  agents_[1]->busy_until(base::Deadline(std::chrono::minutes(5)));
  for (int i = 0; i < 8; ++i) {  // it answers no ring
    agents_[0]->acknowledge();
    const std::string first = sign_of(0), second = sign_of(1);
    seconds_ += 5;
    wait_for_sign(0, first);
    wait_for_sign(1, second);
    ASSERT_EQ(lost(0) + lost(1), "") << "it has work";
  }
  agents_[1]->busy_until(base::Deadline(std::chrono::seconds(0)));
  for (int i = 0; i < 10 && lost(0).empty(); ++i) pass(5, {0});
  EXPECT_EQ(lost(0).find("node 1 has given no sign for"), 0u) << lost(0);
  EXPECT_EQ(lost(1), "");
}

TEST_F(ClockedAgentStoreClientTest, ARequestThatIsUnderWayAsAllStandStillSaysNothingOfTheStore) {
  // Each has given its sign and read the other's: none asks for anything until the clock moves.
  for (const auto& agent : agents_) ASSERT_TRUE(agent->poll_now(base::Deadline(std::chrono::seconds(20))));
  const std::int64_t before = kv_store_->num_requests();
  const auto release = kv_store_->hang();
  agents_[1]->post("word", "said");
  EXPECT_TRUE(comes_true([&] { return kv_store_->num_requests() > before; }));
  EXPECT_EQ(lost(1), "");
  seconds_ += 3600;
  EXPECT_EQ(lost(1), "");
  seconds_ += 5;
  EXPECT_EQ(lost(1), "");
  seconds_ += 5;
  EXPECT_EQ(lost(1).find("the store that node 0 keeps has not answered for"), 0u) << lost(1);
}

TEST(AgentStoreClientTest, TheEndOfARendezvousDoesNotWaitForASilentStore) {
  const auto kv_store = std::make_shared<MapStore>();
  const auto release = kv_store->hang();
  AgentStoreClientOptions options = quick(1, 2);
  options.keep_alive_interval = std::chrono::seconds(5);
  const base::Deadline waited(std::chrono::seconds(60));
  {
    AgentStoreClient store_client(kv_store, options);
    store_client.post("word", "said");
    ::poll(nullptr, 0, 50);
  }
  EXPECT_LT(waited.elapsed(), std::chrono::seconds(20)) << "as long as it is patient";
}

TEST(AgentStoreClientTest, ANodeThatHasComeAndGivesNoFirstSignIsLost) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, hasty(0, 3));
  first.begin_session("this");
  first.expect_signs(2);
  EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
  EXPECT_EQ(first.lost().find("node 2 has given no sign for "), 0u) << first.lost();
}

TEST(AgentStoreClientTest, ManyNodesLookLessOften) {
  const base::Deadline looking(milliseconds(200));
  const auto few = std::make_shared<MapStore>(), many = std::make_shared<MapStore>();
  const auto watch = [](const std::shared_ptr<MapStore>& kv_store, int nnodes) {
    AgentStoreClientOptions options = quick(1, nnodes);
    options.interval = milliseconds(2);
    auto store_client = std::make_unique<AgentStoreClient>(kv_store, options);
    store_client->watch("word");
    return store_client;
  };
  const auto one_of_few = watch(few, 2), one_of_many = watch(many, 1000);
  EXPECT_TRUE(comes_true([&] { return looking.expired() && few->num_requests() > 20; }));
  const std::int64_t of_many = many->num_requests(), of_few = few->num_requests();
  const auto time = std::chrono::ceil<milliseconds>(looking.elapsed()).count();
  EXPECT_LE(of_many, time / (2 * 1000 / 50) + 2) << "one look in 40 ms, of " << time << " ms";
  EXPECT_GT(of_few, of_many);
}

TEST(AgentStoreClientTest, WhatNoAgentOfTheJobHasLeftIsIgnored) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClientOptions options = quick(0, 2, base::Secret::make());
  AgentStoreClient first(kv_store, options);
  first.begin_session("this");
  options.node = 1;
  options.secret = base::Secret::make();
  AgentStoreClient stranger(kv_store, options);
  stranger.begin_session("this");
  first.watch("signed");
  first.watch("plain");
  stranger.post("signed", "15");
  kv_store->set("plain", "15");
  EXPECT_TRUE(comes_true([&] { return first.rejected().size() == 3; }));
  EXPECT_EQ(first.rejected(), (std::vector<std::string>{"alive/1", "plain", "signed"}));
  EXPECT_FALSE(first.received("signed"));
  EXPECT_FALSE(first.received("plain"));
  EXPECT_EQ(first.lost(), "") << "a stranger's sign is none, so its end is none";
}

// Signs that are played again do not hide that a node is gone.
TEST(AgentStoreClientTest, RecordedSignsKeepNobodyAlive) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClientOptions options = hasty(0, 2, base::Secret::make());
  AgentStoreClient first(kv_store, options);
  first.begin_session("this");
  std::set<std::string> signs;
  {
    options.node = 1;
    AgentStoreClient second(kv_store, options);
    second.begin_session("this");
    EXPECT_TRUE(comes_true([&] {
      second.acknowledge();
      if (kv_store->has("alive/1")) signs.insert(kv_store->get("alive/1"));
      return signs.size() >= 5;
    }));
  }
  EXPECT_TRUE(comes_true([&] {
    for (const std::string& sign : signs) kv_store->set("alive/1", sign);
    return !first.lost().empty();
  }));
  EXPECT_NE(first.lost().find("node 1 has given no sign"), std::string::npos) << first.lost();
}

TEST(AgentStoreClientTest, AStoreThatBreaksOrHangsIsLost) {
  const auto broken = std::make_shared<MapStore>();
  AgentStoreClient first(broken, quick(1, 2));
  first.begin_session("this");
  broken->break_it("connection reset\nException raised from recvBytes at Utils.hpp:680");
  EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
  EXPECT_EQ(first.lost(), "the store that node 0 keeps is gone: connection reset");
  EXPECT_TRUE(comes_true([&] { return first.is_lost(1); })) << "nobody is reached";

  const auto hanging = std::make_shared<MapStore>();
  const auto release = hanging->hang();
  AgentStoreClient second(hanging, hasty(1, 2));
  second.begin_session("this");
  EXPECT_TRUE(comes_true([&] { return !second.lost().empty(); }));
  EXPECT_EQ(second.lost().find("the store that node 0 keeps has not answered for"), 0u) << second.lost();
  EXPECT_TRUE(second.is_lost(0)) << "nobody is reached";
}

}  // namespace
}  // namespace cohort::launch
