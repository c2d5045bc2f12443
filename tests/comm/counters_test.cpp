#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cohort/base/timeline.h"
#include "tests/comm/trace_events.h"
#include "tests/support/comes_true.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace {

using base::Timeline;
using nlohmann::json;
using std::chrono::milliseconds;

TEST(CountersTest, CallsBytesAndTimesAreCountedByCollective) {
  std::atomic<bool> is_there{false};  // rank 0, at the broadcast
  test::run_ranks(2, "gloo", [&](Group& group) {
    EXPECT_TRUE(group.counters().empty());
    at::Tensor t = at::ones({3, 5}), all = at::zeros({30});
    group.all_reduce(t).wait();
    group.all_reduce(t).wait();
    group.all_gather(all, t).wait();
    const auto begin = std::chrono::steady_clock::now();
    if (group.rank() == 1) {
      test::wait_until([&] { return is_there.load(); });
      std::this_thread::sleep_for(milliseconds(100));
    }
    is_there = true;
    group.broadcast(t, 1).wait();
    const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin;
    group.barrier();
    const auto counters = group.counters();
    ASSERT_EQ(counters.size(), 4U);
    EXPECT_EQ(counters.at("all_reduce").calls, 2);
    EXPECT_EQ(counters.at("all_reduce").bytes, 2 * 15 * 4);
    EXPECT_EQ(counters.at("all_gather").bytes, 30 * 4);
    EXPECT_EQ(counters.at("barrier").calls, 1);
    const CallCounters& broadcast = counters.at("broadcast");
    EXPECT_LE(broadcast.waiting, broadcast.total);
    EXPECT_LE(broadcast.total, spent);
    if (group.rank() == 0) {
      EXPECT_GE(broadcast.waiting, milliseconds(5)) << "rank 1 came 100 ms later";
    }
  });
}

TEST(CountersTest, OnTheTimelineCallsThatOverlapHaveRowsOfTheirOwn) {
  Timeline::start();
  test::run_ranks(1, "fake", [](Group& group) {
    at::Tensor a = at::ones({6}), b = at::ones({2});
    {
      Pending first = group.all_reduce(a), second = group.broadcast(b, 0);
      second.wait();
      first.wait();
    }
    group.all_gather(a, a).wait();  // on the first row again
  });
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  std::map<int, std::string> rows;
  for (const json& event : test::events_named(trace, "thread_name"))
    rows[event.at("tid")] = event.at("args").at("name");
  const auto row = [&](const char* name) { return rows.at(test::events_named(trace, name).at(0).at("tid")); };
  EXPECT_EQ(row("all_reduce"), "world");
  EXPECT_EQ(row("broadcast"), "world (2)");
  EXPECT_EQ(row("all_gather"), "world");
  EXPECT_EQ(test::events_named(trace, "all_reduce").at(0).at("args").at("bytes"), 24);
}

}  // namespace
}  // namespace cohort::comm
