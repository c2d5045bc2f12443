#include "cohort/comm/trace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/timeline.h"
#include "cohort/comm/init.h"
#include "tests/comm/trace_events.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using base::Timeline;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(TraceChild, DISABLED_Rank) {
  const std::string ahead = std::getenv("CLOCK_AHEAD_MS");
  const std::string folder = std::getenv("TEST_FOLDER");
  Group group = init_process_group({.timeout = seconds(40)});
  if (group.rank() == 1) std::this_thread::sleep_for(seconds(1));  // begins to record later
  Timeline::start();
  group.barrier();
  Timeline::instant("together");
  at::Tensor t = at::ones({2, 3});
  group.all_reduce(t).wait();
  Timeline::stop();
  write_trace(group, folder + "/trace.json",
              {.clock_ahead = milliseconds(group.rank() == 0 ? 0 : group.rank() * std::stoi(ahead))});
}

void expect_aligned(const std::string& ahead) {
  test::RankProcesses ranks("TraceChild", 3, {{"CLOCK_AHEAD_MS", ahead}});
  EXPECT_EQ(ranks.wait(), std::vector<int>(3, 0)) << ranks.output(0);
  const json trace = json::parse(test::read_file(ranks.folder() / "trace.json"));
  std::map<int, double> together;
  for (const json& event : test::events_named(trace, "together"))
    together[event.at("pid")] = event.at("ts").get<double>();
  ASSERT_EQ(together.size(), 3U);
  EXPECT_GE(together[0], 500e3) << "the beginning is that of the first rank";
  for (const int rank : {1, 2})
    EXPECT_NEAR(together[rank], together[0], 450e3) << "clock ahead by " << ahead << " ms";
  const auto sums = test::events_named(trace, "all_reduce");
  ASSERT_EQ(sums.size(), 3U);
  for (const json& sum : sums) EXPECT_EQ(sum.at("args").at("bytes"), 24);
  std::map<int, std::string> names;
  for (const json& event : test::events_named(trace, "process_name"))
    names[event.at("pid")] = event.at("args").at("name");
  EXPECT_EQ(names, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}, {2, "rank 2"}}));
}

TEST(TraceTest, RanksOfOneHostAreWrittenAsOneTrace) {
  expect_aligned("0");
}

TEST(TraceTest, ClocksThatDifferAreAligned) {
  expect_aligned("3600000");
}

TEST(TraceTest, EveryRankIsToldThatTheFileCannotBeWritten) {
  const test::TempDir dir;
  test::run_ranks(2, "gloo", [&](Group& group) {
    COHORT_EXPECT_THROW_WITH(write_trace(group, dir / "no" / "trace.json"), SystemError, "trace.json");
    write_trace(group, dir / "trace.json");  // and continues
  });
  EXPECT_TRUE(json::parse(test::read_file(dir / "trace.json")).contains("traceEvents"));
}

TEST(TraceTest, EachRoundRemovesTheKeysOfTheOneBefore) {
  const test::TempDir dir;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::int64_t> keys;  // of rank 0
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Group group = make_group(store, rank, 2, "shm", test::kSlowdown * seconds(20));
      at::Tensor here = at::ones({1});
      for (int round = 0; round < 5; ++round) {
        write_trace(group, dir / "trace.json");
        group.all_reduce(here).wait();  // both are through
        if (rank == 0) keys.push_back(store->getNumKeys());
        group.all_reduce(here).wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(keys, std::vector<std::int64_t>(5, keys.at(0)));
}

TEST(TraceTest, ARankThatDoesNotComeIsNamed) {
  const test::TempDir dir;
  test::run_ranks(3, "gloo", [&](Group& group) {
    group.barrier();
    if (group.rank() != 1) {
      COHORT_EXPECT_THROW_WITH(write_trace(group, dir / "t.json", {.timeout = milliseconds(500)}),
                               TimeoutError, "ms): rank 1 has not come");
    }
    group.barrier();
  });
  // It stops once all ranks have come, at each word that others wait for.
  for (const int stopped : {0, 1}) {
    for (const char* clock : {"another clock", ""}) {
      const bool alike = *clock == '\0';
      test::run_ranks(2, "gloo", [&](Group& group) {
        const milliseconds time(300);
        if (group.rank() == stopped) {
          std::string clock_text = clock;
          if (alike) std::ifstream("/proc/sys/kernel/random/boot_id") >> clock_text;
          group.store()->set(base::concat("trace/0/clock/", stopped), clock_text);
        }
        group.barrier();
        if (group.rank() != stopped) {
          const base::Deadline waited(time);
          COHORT_EXPECT_THROW_WITH(write_trace(group, dir / "t.json", {.timeout = time}), TimeoutError,
                                   base::concat("rank ", stopped, " has come and does not continue"));
          EXPECT_LT(waited.elapsed(), time + test::deadline_slack());
        }
        group.barrier();
      });
    }
  }
  // Rank 0 takes those with another clock one after the other: who waits for it after a rank that does not
  // continue names that rank.
  test::run_ranks(3, "gloo", [&](Group& group) {
    if (group.rank() == 1) group.store()->set("trace/0/clock/1", "another clock");
    group.barrier();
    if (group.rank() != 1) {
      COHORT_EXPECT_THROW_WITH(
          write_trace(group, dir / "t.json",
                      {.timeout = milliseconds(500), .clock_ahead = milliseconds(group.rank())}),
          TimeoutError, "rank 1 has come and does not continue");
    }
    group.barrier();
  });
  // Rank 0 has all, and does not say what came of the file.
  test::run_ranks(2, "gloo", [&](Group& group) {
    const milliseconds time(300);
    if (group.rank() == 0) {
      std::string clock;
      std::ifstream("/proc/sys/kernel/random/boot_id") >> clock;
      group.store()->set("trace/0/clock/0", clock);
      group.store()->set("trace/0/begin/0", "0");
    }
    group.barrier();
    if (group.rank() == 0) {
      at::Tensor head = at::empty({2}, at::kLong);
      group.recv(head, 1, 0x7ace).wait();
      at::Tensor piece = at::empty({head[0].item<std::int64_t>()}, at::kByte);
      group.recv(piece, 1, 0x7ace).wait();
    } else {
      const base::Deadline waited(time);
      COHORT_EXPECT_THROW_WITH(write_trace(group, dir / "t.json", {.timeout = time}), TimeoutError,
                               "rank 0 has come and does not continue");
      EXPECT_LT(waited.elapsed(), time + test::deadline_slack());
    }
    group.barrier();
  });
  test::run_ranks(1, "fake", [&](Group& group) { write_trace(group, dir / "alone.json"); });
  EXPECT_TRUE(std::filesystem::exists(dir / "alone.json"));
}

}  // namespace
}  // namespace cohort::comm
