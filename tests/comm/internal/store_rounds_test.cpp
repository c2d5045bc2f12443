// One thread, and a store in this process: what other ranks do is written to the store beforehand.
#include "cohort/comm/internal/store_rounds.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/messages.h"

namespace cohort::comm {
namespace {

class StoreRoundsTest : public testing::Test {
 protected:
  StoreRoundsTest() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) { log_ += std::string(line) + "\n"; });
  }
  ~StoreRoundsTest() override { base::set_log_sink({}); }

  StoreRounds rounds_of(int rank) { return {std::make_shared<GroupRegistry>(rank, 2), store_}; }
  void set(const std::string& key, const std::string& value) { store_->set("desync/" + key, value); }
  bool has(const std::string& key) { return store_->check({"desync/" + key}); }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::string log_;
};

TEST_F(StoreRoundsTest, ARankAnswersEachRoundOnce) {
  StoreRounds rounds = rounds_of(1);
  rounds.answer_questions();
  EXPECT_FALSE(has("answer/0/1")) << "nobody has asked";
  for (const char* round : {"0", "1"}) set(std::string("asked/") + round, "signal 12 on rank 0");
  rounds.answer_questions();
  for (const char* key : {"answer/0/1", "answer/1/1"}) {
    EXPECT_TRUE(has(key)) << key;
    store_->deleteKey(std::string("desync/") + key);
  }
  rounds.answer_questions();
  EXPECT_FALSE(has("answer/0/1") || has("answer/1/1"));
}

TEST_F(StoreRoundsTest, OfTwoRanksThatAskOneLogsATable) {
  StoreRounds first = rounds_of(0), second = rounds_of(1);
  set("answer/0/1", "");
  first.ask("signal 12 on rank 0", base::LogLevel::kWarning);
  test::expect_in(log_, {"what the ranks were doing (signal 12 on rank 0):"});
  EXPECT_TRUE(has("table/0"));
  log_.clear();
  second.ask("rank 1: it failed", base::LogLevel::kError);
  EXPECT_EQ(log_, "");
  EXPECT_FALSE(has("asked/1"));
}

TEST_F(StoreRoundsTest, AFailureSoonAfterAnotherRanksIsOfItsTable) {
  StoreRounds rounds = rounds_of(0);
  set("asked/0", "rank 1: it failed");
  set("table/0", "1");
  rounds.ask_after_failure("it failed too");
  EXPECT_TRUE(has("answer/0/0") && has("last/0"));
  EXPECT_EQ(log_, "");
  EXPECT_FALSE(has("asked/1"));
}

TEST_F(StoreRoundsTest, AFailureAfterAQuestionOnASignalAsksForATableOfItsOwn) {
  StoreRounds rounds = rounds_of(1);
  set("asked/0", "signal 12 on rank 0");
  set("last/0", "");  // rank 0 has failed, and answers no more
  rounds.ask_after_failure("it failed");
  test::expect_in(log_, {"what the ranks were doing (rank 1: it failed):"});
  EXPECT_EQ(store_->get_to_str("desync/asked/1"), "rank 1: it failed");
  EXPECT_TRUE(has("table/1"));
}

TEST_F(StoreRoundsTest, RankZeroDoesNotWaitForRanksThatHaveLeft) {
  StoreRounds first = rounds_of(0), second = rounds_of(1);
  const base::Deadline waited(std::chrono::seconds(1));
  second.leave(true);
  first.leave(true);
  EXPECT_LT(waited.elapsed(), std::chrono::seconds(1));
  const base::Deadline alone(std::chrono::seconds(1));
  rounds_of(0).leave(true);  // a third departure is the first of a round that nobody completes
  EXPECT_GE(alone.elapsed(), std::chrono::milliseconds(900));
}

TEST_F(StoreRoundsTest, LargeJobsLookLessOftenAndEndLater) {
  const StoreRounds small = rounds_of(0), large(std::make_shared<GroupRegistry>(0, 5120), store_);
  EXPECT_EQ(large.poll_time(), 5 * small.poll_time());
  EXPECT_EQ(small.end_time(), std::chrono::milliseconds(3500)) << "docs/design/group.md";
  EXPECT_EQ(large.end_time(), std::chrono::milliseconds(4500));
}

}  // namespace
}  // namespace cohort::comm
