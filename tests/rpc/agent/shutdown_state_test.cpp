#include "cohort/rpc/internal/agent/shutdown_state.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/internal/agent/worker_table.h"

namespace cohort::rpc {
namespace {

using Counts = std::vector<std::uint64_t>;
using Texts = std::vector<std::string>;

// Worker 0 of w0 and w1.
class ShutdownStateTest : public ::testing::Test {
 protected:
  ShutdownStateTest() {
    std::vector<KnownWorker> workers(2);
    workers[0].info = {"w0", 0};
    workers[1].info = {"w1", 1};
    workers_.set(std::move(workers));
    state_.set_num_workers(2);
    state_.begin_leaving();
  }
  WorkerTable workers_{0};
  ShutdownState state_;
};

TEST_F(ShutdownStateTest, ItIsOverWhenTheCountsOfBothFitTogether) {
  state_.count_sent(1);
  state_.count_sent(1);
  state_.count_unsent(1);
  state_.count_received(1);
  EXPECT_EQ(state_.next_report(0), (IdleReport{Counts{0, 1}, Counts{0, 1}}));
  EXPECT_FALSE(state_.is_over());
  state_.on_report(1, IdleReport{Counts{1, 0}, Counts{0, 0}});
  EXPECT_FALSE(state_.is_over());
  EXPECT_EQ(state_.describe_missing_call(workers_), "a call of w0 that has not come to w1");
  state_.on_report(1, IdleReport{Counts{1, 0}, Counts{1, 0}});
  EXPECT_TRUE(state_.is_over());
  EXPECT_EQ(state_.describe_missing_call(workers_), "");
}

TEST_F(ShutdownStateTest, EachStateIsReportedOnceAndAgainInTheNextShutdown) {
  EXPECT_TRUE(state_.next_report(0).has_value());
  EXPECT_FALSE(state_.next_report(0).has_value());
  state_.on_report(1, IdleReport{Counts{0, 0}, Counts{0, 0}});
  EXPECT_TRUE(state_.is_over());
  state_.count_received(1);
  EXPECT_FALSE(state_.is_over());  // the others do not know of the call
  EXPECT_TRUE(state_.next_report(0).has_value());
  state_.end_leaving();
  EXPECT_FALSE(state_.is_leaving());
  state_.begin_leaving();
  EXPECT_TRUE(state_.is_leaving());
  EXPECT_TRUE(state_.next_report(0).has_value());
}

TEST_F(ShutdownStateTest, AWorkerIsMissingUntilItHasReportedOrIsGone) {
  EXPECT_EQ(state_.describe_missing(workers_, 0), Texts{"w1, which has not come to shutdown()"});
  state_.on_report(1, std::nullopt);
  EXPECT_EQ(state_.describe_missing(workers_, 0), Texts{"w1, which has calls under way, or has given up"});
  state_.on_report(1, IdleReport{Counts{0, 0}, Counts{0, 0}});
  EXPECT_EQ(state_.describe_missing(workers_, 0), Texts{});
}

TEST_F(ShutdownStateTest, CallsOfAWorkerThatIsGoneDoNotCount) {
  state_.count_sent(1);
  EXPECT_TRUE(state_.next_report(0).has_value());
  EXPECT_FALSE(state_.is_over());
  state_.on_down(1);
  EXPECT_TRUE(state_.is_over());
}

}  // namespace
}  // namespace cohort::rpc
