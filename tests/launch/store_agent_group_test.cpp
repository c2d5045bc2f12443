// Agents without ranks, which exchange words through a map instead of a store.
#include "cohort/launch/internal/store_agent_group.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "tests/launch/quick_store_client.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

// One agent of a job.
struct Node {
  Node(const AgentStoreClientOptions& client_options, const std::shared_ptr<test::MapStore>& kv_store)
      : client(kv_store, client_options) {
    options.nnodes = client_options.nnodes;
    options.node_rank = client_options.node;
    options.max_restarts = 1;
    group = std::make_unique<StoreAgentGroup>(options, client);
  }

  RunOptions options;
  AgentStoreClient client;
  std::unique_ptr<StoreAgentGroup> group;
};

std::optional<AttemptReport> result_of(Node& node) {
  std::optional<AttemptReport> result;
  comes_true([&] { return (result = node.group->result()).has_value(); });
  return result;
}

class StoreAgentGroupTest : public testing::Test {
 protected:
  void begin_attempt(int number) {
    for (Node* node : {&leader_, &follower_}) node->group->begin_attempt(number);
  }

  const std::shared_ptr<test::MapStore> kv_store_ = std::make_shared<test::MapStore>();
  Node leader_{quick(0, 2), kv_store_}, follower_{quick(1, 2), kv_store_};
};

AttemptReport failure_of(int rank, double time) {
  AttemptReport report;
  report.status = 10 + rank;
  RankFailure& failure = report.failures.emplace_back();
  failure.rank = rank;
  failure.status = report.status;
  failure.time = time;
  return report;
}

TEST_F(StoreAgentGroupTest, AllGetTheResultThatNode0MakesOfAllReports) {
  for (const int attempt : {0, 1}) {
    begin_attempt(attempt);
    leader_.group->post_report(failure_of(0, 9));
    EXPECT_FALSE(leader_.group->result()) << "node 1 has not reported";
    EXPECT_FALSE(follower_.group->result());
    follower_.group->post_report(failure_of(1, 8));
    const auto first = result_of(leader_), second = result_of(follower_);
    ASSERT_TRUE(first && second);
    EXPECT_EQ(first->to_json(), second->to_json());
    EXPECT_EQ(first->status, 11) << "rank 1 failed first";
    EXPECT_EQ(first->failures.size(), 2u);
    EXPECT_EQ(first->restart, attempt == 0);
  }
}

TEST_F(StoreAgentGroupTest, Node0LeavesOnceTheResultIsReadThere) {
  begin_attempt(0);
  leader_.group->post_report({});
  follower_.group->post_report({});
  ASSERT_TRUE(result_of(leader_));
  EXPECT_FALSE(leader_.group->may_leave());
  ASSERT_TRUE(result_of(follower_));
  EXPECT_TRUE(follower_.group->may_leave());
  EXPECT_TRUE(comes_true([&] { return leader_.group->may_leave(); }));
}

// Node 1 lives, and gives signs. Node 2 does not.
TEST(LostNodeTest, Node0WaitsForTheOthersThoughOneIsLost) {
  const auto kv_store = std::make_shared<test::MapStore>();
  Node leader(hasty(0, 3), kv_store), reader(hasty(1, 3), kv_store);
  {
    Node lost(hasty(2, 3), kv_store);
    for (Node* node : {&leader, &reader, &lost}) {
      node->client.busy_until(base::Deadline(std::chrono::minutes(1)));  // signs do not wait for this thread
      node->client.begin_session("this");
      node->group->begin_attempt(0);
      node->group->post_report({});
    }
    ASSERT_TRUE(result_of(leader));
    EXPECT_FALSE(leader.group->may_leave());
    ASSERT_TRUE(comes_true([&] { return kv_store->has("alive/2"); }));
  }
  leader.client.expect_signs(2);
  ASSERT_TRUE(comes_true([&] { return leader.client.is_lost(2); }));
  EXPECT_NE(leader.client.lost().find("node 2 has given no sign"), std::string::npos);
  EXPECT_FALSE(leader.client.is_lost(1));
  EXPECT_FALSE(leader.group->may_leave()) << "node 1 has not read the result";
  ASSERT_TRUE(result_of(reader));
  EXPECT_TRUE(comes_true([&] { return leader.group->may_leave(); }));
}

TEST_F(StoreAgentGroupTest, AFailureEndsItsAttemptAndNoLaterOne) {
  begin_attempt(0);
  EXPECT_FALSE(leader_.group->is_attempt_over());
  follower_.group->announce_failure();
  EXPECT_TRUE(comes_true([&] { return leader_.group->is_attempt_over(); }));
  begin_attempt(1);
  EXPECT_FALSE(leader_.group->is_attempt_over());
}

TEST_F(StoreAgentGroupTest, AnAgentThatGivesUpEndsTheAttemptAndTheWaitForAResult) {
  begin_attempt(0);
  follower_.group->announce_abort("no disk");
  EXPECT_TRUE(comes_true([&] { return leader_.group->is_attempt_over(); }));
  leader_.group->post_report({});
  COHORT_EXPECT_THROW_WITH(leader_.group->result(), PeerError, "another agent gave up: node 1: no disk");
}

TEST_F(StoreAgentGroupTest, ALostStoreEndsTheWaitAndKeepsNobody) {
  begin_attempt(0);
  leader_.group->post_report({});
  kv_store_->break_it("gone");
  EXPECT_TRUE(comes_true([&] { return leader_.group->is_attempt_over(); }));
  COHORT_EXPECT_THROW_WITH(leader_.group->result(), PeerError, "the store that node 0 keeps is gone: gone");
  EXPECT_TRUE(leader_.group->may_leave());
}

TEST_F(StoreAgentGroupTest, ASignalReachesTheOthersAsOneThatTheyHandle) {
  follower_.options.signals_to_handle = {SIGTERM};
  EXPECT_EQ(follower_.group->stop_signal(), 0);
  leader_.group->announce_stop(SIGINT);
  EXPECT_TRUE(comes_true([&] { return follower_.group->stop_signal() != 0; }));
  EXPECT_EQ(follower_.group->stop_signal(), SIGTERM);
  EXPECT_TRUE(comes_true([&] { return leader_.group->stop_signal() != 0; }));
  EXPECT_EQ(leader_.group->stop_signal(), SIGINT);
}

TEST_F(StoreAgentGroupTest, TheCallerAsksAsOftenAsTheStoreClientNeeds) {
  leader_.options.monitor_interval = std::chrono::hours(1);
  EXPECT_EQ(leader_.group->poll_interval(), leader_.client.round_time());
  leader_.options.monitor_interval = std::chrono::milliseconds(1);
  EXPECT_EQ(leader_.group->poll_interval(), std::chrono::milliseconds(1));
}

TEST(SingleAgentTest, AgreesWithItself) {
  RunOptions options;
  options.max_restarts = 1;
  SingleAgent agent(options);
  for (const int attempt : {0, 1}) {
    agent.begin_attempt(attempt);
    EXPECT_FALSE(agent.result()) << "nothing is posted";
    agent.post_report(failure_of(3, 1));
    const auto result = agent.result();
    ASSERT_TRUE(result);
    EXPECT_EQ(result->status, 13);
    EXPECT_EQ(result->restart, attempt == 0);
  }
  EXPECT_TRUE(agent.may_leave());
}

TEST(CombinedReportTest, ASignalOfAnyNodeEndsTheJobThoughRanksHaveFailed) {
  AttemptReport stopped;
  stopped.signal = SIGINT;
  stopped.status = 42;
  const AttemptReport result = combine({{}, stopped, failure_of(1, 2)}, true);
  EXPECT_EQ(result.signal, SIGINT);
  EXPECT_EQ(result.status, 42) << "the first that is not 0";
  EXPECT_FALSE(result.restart);
  EXPECT_FALSE(combine({{}, {}}, true).restart) << "nothing has failed";
}

}  // namespace
}  // namespace cohort::launch
