// What `cohort train` makes of the configuration of an elastic run.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/elastic/session.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/rank_link.h"
#include "cohort/train/run.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

TEST(ElasticConfigTest, ProcessesWaitForEachOtherAsLongAsCommTimeoutSays) {
  const test::SmallRun small;
  const membership::NetStoreServer store({});
  auto [agent, process] = membership::RankLink::make_pair();
  membership::RankOrder order;
  order.revision = 1;
  order.origin = "a test";
  order.generation.number = 1;
  order.generation.virtual_ranks = 4;
  order.generation.store = store.address();
  // The second process never comes.
  order.generation.members = {{1, "agent 1", "127.0.0.1:1", 1}, {2, "agent 2", "127.0.0.1:1", 1}};
  order.process = 0;
  ASSERT_TRUE(agent.send(to_text(order), base::Deadline(std::chrono::seconds(20))));
  const test::ScopedEnv fd("COHORT_AGENT_FD", std::to_string(process.fd()));
  const test::ScopedEnv ranks("COHORT_VIRTUAL_RANKS", "4");
  const auto begin = std::chrono::steady_clock::now();
  auto run = std::async(std::launch::async, [&] {
    run_training(small.config({"distributed.elastic=true", "train.threads=1", "comm.timeout=0.5"}),
                 "cohort train");
  });
  // Then it asks for a generation without the process that does not come.
  const base::Deadline deadline(std::chrono::seconds(100));
  std::vector<membership::MemberId> lost;
  while (lost.empty()) {
    const auto text = agent.receive(deadline);
    ASSERT_TRUE(text.has_value());
    lost = membership::parse_rank_status(*text).lost_links;
  }
  EXPECT_EQ(lost, std::vector<membership::MemberId>{2});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(100));
  order.revision = 2;
  order.has_ended = true;
  order.end_cause = "enough of it";
  ASSERT_TRUE(agent.send(to_text(order), base::Deadline(std::chrono::seconds(20))));
  COHORT_EXPECT_THROW_WITH(run.get(), elastic::RunEnded, "the run has ended: enough of it");
}

}  // namespace
}  // namespace cohort::train
