#include "cohort/comm/desync.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/comm/init.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/report.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::expect_in;

TEST(FlightRecordTest, KeepsTheLastCallsAndForgetsWhatWasPushedOut) {
  FlightRecord record;
  Signature signature("all_reduce", {});
  std::vector<std::uint64_t> tickets;
  for (signature.number = 0; signature.number < 70; ++signature.number) {
    tickets.push_back(record.begin(signature, signature.number));
  }
  record.set(tickets[69], CallState::kWaiting);
  record.set(tickets[5], CallState::kFailed);  // pushed out by number 69
  const auto last = record.last();
  ASSERT_EQ(last.size(), FlightRecord::kCalls);
  EXPECT_EQ(last.front().signature.number, 6);
  EXPECT_EQ(last.back().signature.number, 69);
  EXPECT_EQ(last.back().state, CallState::kWaiting);
  for (const FlightEntry& entry : last) EXPECT_NE(entry.state, CallState::kFailed);
  EXPECT_GT(last.back().num_frames, 0);
}

TEST(ReportTest, SaysWhatARankWaitsForSinceWhenAndFromWhereItWasCalled) {
  std::atomic<bool> reported{false};
  std::string text;
  test::run_ranks(2, "gloo", [&](Group& group) {
    at::Tensor t = at::ones({3, 5});
    group.broadcast(t, 1).wait();
    if (group.rank() == 1) {
      Pending late = group.all_reduce(t);  // compared: comes back when rank 0 has made the call
      late.wait();
      return;
    }
    const base::Deadline deadline(seconds(20));
    while (!reported) {
      deadline.check("test", "rank 1 to wait");
      text = report();
      reported = text.find("all_reduce 1 float[3, 5] SUM: waiting since ") != std::string::npos;
    }
    group.all_reduce(t).wait();
  });
  expect_in(text, {"group 'world' (gloo), rank 1/2, rank 1 of the job, 2 collectives",
                   "last done: broadcast 0 float[3, 5] from 1: done for ", "comm_test+0x"});
#ifndef __SANITIZE_THREAD__  // its backtrace() begins with a frame of its own
  EXPECT_EQ(text.find("libcohort_comm"), std::string::npos)
      << "the caller's frames are wanted, not ours: " << text;
#endif
  EXPECT_EQ(report(), "this process is in no group");
}

TEST(JoinedReportTest, AnswersSurviveTheWay) {
  const std::vector<Answer> answers = {
      {"world", 3, 17, "all_reduce 17 float[3, 4] SUM", "waiting", 1234, "main+0x1 (a)"},
      {"world.0", 3, -1, "", "", 0, ""}};
  EXPECT_EQ(read_answers(write_answers(answers)), answers);
  EXPECT_EQ(read_answers("nonsense\n1\t2\n\n"), std::vector<Answer>{});
}

TEST(JoinedReportTest, SaysWhoIsBehindWhoCalledSomethingElseAndWhoDidNotAnswer) {
  const auto at = [](int rank, std::int64_t position, const char* call) {
    return std::optional(std::vector<Answer>{{"world", rank, position, call, "waiting", 9, "main"}});
  };
  const std::string behind =
      join_answers({at(0, 17, "all_reduce 17 float[3] SUM"), at(1, 16, "broadcast 16 float[1] from 0"),
                    std::nullopt, at(3, 17, "all_reduce 17 float[3] SUM")});
  expect_in(behind,
            {"rank  group  last call", "\n1     world  broadcast 16 float[1] from 0",
             "waiting since 9 ms  main", "\nrank 1 is behind in group 'world'", "\nrank 2 did not answer"});
  EXPECT_EQ(behind.find("different things"), std::string::npos) << behind;
  const std::string mixed =
      join_answers({at(0, 17, "all_reduce 17 float[3] SUM"), at(1, 17, "all_reduce 17 float[4] SUM"),
                    at(2, 17, "all_reduce 17 float[3] SUM")});
  expect_in(
      mixed,
      {"ranks called different things in group 'world': ranks 0 and 2: all_reduce 17 float[3] SUM; rank 1: "
       "all_reduce 17 float[4] SUM"});
  EXPECT_EQ(mixed.find("behind"), std::string::npos) << mixed;
  const std::string alike = join_answers({at(0, 2, "barrier 2"), at(1, 2, "barrier 2")});
  EXPECT_EQ(alike.find("group 'world'"), std::string::npos) << alike;
}

// What the children below do is told by TEST_CASE; they say "ready" when they do.
TEST(DesyncChild, DISABLED_Rank) {
  const std::string what = std::getenv("TEST_CASE");
  Group group = init_process_group(
      {.timeout = seconds(40),
       .check_consistency = what == "stopped" ? ConsistencyCheck::kOff : ConsistencyCheck::kFirst});
  const auto watch = watch_for_desync(group);
  at::Tensor t = at::ones({2, 3});
  group.all_reduce(t).wait();
  const int odd = group.size() - 1;  // the one that does otherwise
  std::fprintf(stderr, "ready\n");
  if (what == "behind") {
    if (group.rank() == odd) {
      std::this_thread::sleep_for(seconds(4));
      return;
    }
    at::Tensor u = at::ones({7});
    COHORT_EXPECT_THROW_WITH(group.broadcast(u, 0, {milliseconds(700)}).wait(), Error,
                             "broadcast 1 of group 'world'");
    return;
  }
  if (what == "stopped") {
    if (group.rank() == odd) ::raise(SIGSTOP);
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t, ReduceOp::SUM, {milliseconds(700)}).wait(), Error,
                             "all_reduce 1 of group 'world'");
    return;
  }
  if (what == "signal") {  // stuck, with the signal blocked in no thread, until the test has seen enough
    if (group.rank() == odd) group.store()->wait({"enough"}, seconds(40));
    if (group.rank() == odd) return;
    at::Tensor u = at::ones({7});
    COHORT_EXPECT_THROW_WITH(group.broadcast(u, 0, {seconds(40)}).wait(), Error, "broadcast 1");
  }
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(DesyncTest, WhenACallFailsOneTableOfAllRanksIsLogged) {
  test::RankProcesses ranks("DesyncChild", 3, {{"TEST_CASE", "behind"}});
  EXPECT_EQ(ranks.wait(), std::vector<int>(3, 0));
  std::string all;
  for (int rank = 0; rank < 3; ++rank) all += ranks.output(rank);
  EXPECT_EQ(count(all, "what the ranks were doing (rank "), 1U) << all;
  expect_in(all, {"broadcast 1 float[7] from 0", "\n2     world  all_reduce 0 float[2, 3] SUM", "done for ",
                  "\nrank 2 is behind in group 'world'"});
  EXPECT_EQ(all.find("did not answer"), std::string::npos) << all;
}

TEST(DesyncTest, ARankThatIsStoppedIsTheOneThatDidNotAnswer) {
  test::RankProcesses ranks("DesyncChild", 3, {{"TEST_CASE", "stopped"}});
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "ready");
  ranks.wait_for(0, "PASSED");
  std::string all;
  for (int rank = 0; rank < 3; ++rank) all += ranks.output(rank);
  EXPECT_EQ(count(all, "what the ranks were doing (rank "), 1U) << all;
  expect_in(all, {"\nrank 2 did not answer: dead, stopped, or not watching",
                  "all_reduce 1 float[2, 3] SUM  failed after "});
}

TEST(DesyncTest, OnTheSignalAStuckRankWritesItsReportAndRankZeroTheTable) {
  test::RankProcesses ranks("DesyncChild", 2, {{"TEST_CASE", "signal"}});
  ranks.wait_for(0, "ready");
  ranks.wait_for(1, "ready");
  ranks.send(1, SIGUSR2);
  ranks.wait_for(1, "last done: all_reduce 0 float[2, 3] SUM");
  EXPECT_EQ(ranks.output(1).find("what the ranks were doing"), std::string::npos) << ranks.output(1);
  const base::Deadline deadline(seconds(20));
  while (ranks.output(0).find("broadcast 1 float[7] from 0: waiting since ") == std::string::npos &&
         !deadline.expired()) {
    ranks.send(0, SIGUSR2);  // until it has come to the call
    std::this_thread::sleep_for(milliseconds(300));
  }
  ranks.wait_for(0, "rank 1 is behind in group 'world'");
  expect_in(ranks.output(0),
            {"signal 12:\ngroup 'world' (shm), rank 0/2", "(signal 12 on rank 0):\nrank  group"});
}

TEST(DesyncTest, NothingIsLeftAfterManyStartsAndStops) {
  const auto entries = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
  };
  test::run_ranks(1, "gloo", [&](Group& group) {
    { const auto first = watch_for_desync(group); }  // what is made once
    std::this_thread::sleep_for(milliseconds(50));
    const auto threads = entries("/proc/self/task"), files = entries("/proc/self/fd");
    for (int i = 0; i < 200; ++i) const auto watch = watch_for_desync(group);
    // A thread is gone a moment after its work, those that were counted too.
    EXPECT_TRUE(test::comes_true([&] { return entries("/proc/self/task") <= threads; }));
    EXPECT_EQ(entries("/proc/self/fd"), files);
    struct sigaction now {};
    ASSERT_EQ(::sigaction(SIGUSR2, nullptr, &now), 0);
    EXPECT_EQ(now.sa_handler, SIG_DFL) << "the handler that was there before is back";
  });
}

TEST(DesyncTest, ARankThatDoesNotLeaveHoldsUpTheOneThatKeepsTheStoreForASecond) {
  std::atomic<bool> has_left{false};
  test::run_ranks(2, "gloo", [&](Group& group) {
    std::optional<DesyncWatch> watch = watch_for_desync(group, 0);
    group.barrier();
    if (group.rank() == 1) return test::wait_until([&] { return has_left.load(); });
    const base::Deadline waited(seconds(1));
    watch.reset();
    EXPECT_LT(waited.elapsed(), seconds(1) + test::deadline_slack());
    has_left = true;
  });
}

// Rank 1 asked as it failed, and is gone before it has made the table.
TEST(DesyncTest, CallsThatFailTogetherWaitOnceForTheTable) {
  std::string lines;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { lines += std::string(line) + "\n"; });
  {
    const Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake", seconds(20));
    const auto state = group.shared_state();
    const auto watch = watch_for_desync(group, 0);
    state->store->set("desync/asked/0", "rank 1: it failed");
    for (int i = 0; i < 4; ++i) state->registry->hang_detector()->failed("a call of rank 0");
  }
  base::set_log_sink({});
  EXPECT_EQ(lines.find("left behind"), std::string::npos) << lines;
}

TEST(DesyncTest, OneWatchAtATime) {
  test::run_ranks(1, "gloo", [](Group& group) {
    const auto watch = watch_for_desync(group);
    COHORT_EXPECT_THROW_WITH(watch_for_desync(group), UsageError, "group 'world' is watched already");
    test::run_ranks(1, "gloo", [](Group& other) {
      COHORT_EXPECT_THROW_WITH(watch_for_desync(other), UsageError,
                               "another watch of this process has a signal");
      const auto silent = watch_for_desync(other, 0);
    });
  });
}

}  // namespace
}  // namespace cohort::comm
