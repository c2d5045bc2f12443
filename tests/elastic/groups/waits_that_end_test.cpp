// How soon what waits for processes of a generation throws once that generation has ended.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/comm/internal/group_state.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "tests/elastic/groups/group_run.h"
#include "tests/support/comes_true.h"
#include "tests/support/environment.h"
#include "tests/support/slowdown.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using comm::ConsistencyCheck;
using test::count_calls;
using test::GroupRun;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct Kind {
  std::string backend;
  ConsistencyCheck check;
  double max_ms;  // on two cores that do other work, too
};

/// How long calls of several generations waited after the news.
struct Delays {
  void add(Clock::duration delay) {
    const std::lock_guard lock(mutex);
    ms.push_back(std::chrono::duration<double, std::milli>(delay).count());
  }
  double percentile(double part) {
    std::ranges::sort(ms);
    return ms.at(static_cast<std::size_t>(part * static_cast<double>(ms.size() - 1)));
  }
  void print(const std::string& what) {
    std::cout << what << ": " << ms.size() << " calls that waited have thrown after " << percentile(0.5)
              << " ms in the median, p99 " << percentile(0.99) << " ms, maximum " << percentile(1) << " ms\n";
  }
  std::mutex mutex;
  std::vector<double> ms;
};

int num_rounds() {
  return static_cast<int>(test::env_number("COHORT_ROUNDS", 5));
}

// A comparison waits in the store, and a call that is not compared in the backend. The median of several
// rounds counts, as a thread may wait for its core.
TEST(ElasticSessionGroupsTest, CallsThatWaitThrowWhenTheGenerationEnds) {
  const int rounds = num_rounds();
  for (const Kind& kind : {Kind{"shm", ConsistencyCheck::kFirst, 10}, Kind{"shm", ConsistencyCheck::kOff, 10},
                           Kind{"gloo", ConsistencyCheck::kOff, 100}}) {
    SCOPED_TRACE(kind.backend);
    GroupRun run(3);
    const GroupOptions options{.backend = kind.backend, .check_consistency = kind.check};
    std::vector<comm::Group> groups(2);
    std::atomic<int> num_waiting{0};
    std::atomic<Clock::time_point> decided{Clock::now()};
    Delays delays;
    run.start([&](Session& session, GenerationInfo info) {
      for (int round = 1; round <= rounds; ++round) {
        comm::Group group = session.make_group(options);
        EXPECT_EQ(group.rank(), info.process);
        EXPECT_EQ(count_calls(group), 3);
        group.barrier();
        if (info.process == 2) {
          test::wait_until([&] { return session.must_enter(); });
          info = session.enter(0);  // throws at the end of the run
          continue;
        }
        groups[static_cast<std::size_t>(info.process)] = group;
        ++num_waiting;
        COHORT_EXPECT_THROW_WITH(count_calls(group), GenerationEnded,
                                 base::concat("generation ", round + 1, " follows: a test"));
        delays.add(Clock::now() - decided.load());
        COHORT_EXPECT_THROW_WITH(count_calls(group), GenerationEnded, "has ended");
        COHORT_EXPECT_THROW_WITH(group.barrier(), GenerationEnded, "has ended");
        COHORT_EXPECT_THROW_WITH(session.make_group(options), GenerationEnded, "has ended");
        info = session.enter(0);
        COHORT_EXPECT_THROW_WITH(count_calls(group), GenerationEnded, "has ended");
      }
      EXPECT_EQ(count_calls(session.make_group(options)), 2);
    });
    for (int round = 1; round <= rounds; ++round) {
      run.agents.wait_until([&] {
        return num_waiting == 2 * round && groups[0].shared_state()->calls_under_way > 0 &&
               groups[1].shared_state()->calls_under_way > 0;
      });
      decided = Clock::now();
      run.agents.decide(round < rounds ? run.ranks : std::vector{run.ranks[0], run.ranks[1]});
    }
    run.end({run.ranks[0], run.ranks[1]});
    delays.print(kind.backend + (kind.check == ConsistencyCheck::kOff ? "" : ", in a comparison"));
    EXPECT_LT(delays.percentile(0.5), kind.max_ms * test::kSlowdown);
  }
}

// As a step does, in the session's own exchange.
TEST(ElasticSessionGroupsTest, AnExchangeThatWaitsThrowsWhenTheGenerationEnds) {
  const int rounds = num_rounds();
  GroupRun run(3);
  std::atomic<int> num_ready{0};
  std::atomic<Clock::time_point> decided{Clock::now()};
  Delays delays;
  run.start([&](Session& session, GenerationInfo info) {
    for (int round = 1; round <= rounds; ++round) {
      const auto exchange = session.exchange();
      exchange->begin_step();
      EXPECT_EQ(parallel::all_gather_texts(exchange.get(), "a step").size(), 3U);
      ++num_ready;
      if (info.process == 2) {
        test::wait_until([&] { return session.must_enter(); });
      } else {
        COHORT_EXPECT_THROW_WITH(parallel::all_gather_texts(exchange.get(), "a step"), GenerationEnded,
                                 base::concat("generation ", round, " has ended"));
        delays.add(Clock::now() - decided.load());
      }
      info = session.enter(0);  // of process 2: throws at the end of the run
    }
  });
  for (int round = 1; round <= rounds; ++round) {
    run.agents.wait_until([&] { return num_ready == 3 * round; });
    decided = Clock::now();
    run.agents.decide(round < rounds ? run.ranks : std::vector{run.ranks[0], run.ranks[1]});
  }
  run.end({run.ranks[0], run.ranks[1]});
  delays.print("the session's exchange");
  EXPECT_LT(delays.percentile(0.5), 10 * test::kSlowdown);
}

// The user has c10d's group, and nothing else of it.
TEST(ElasticSessionGroupsTest, AProcessGroupThatOutlivesItsGroupEndsWithTheGeneration) {
  for (const char* const backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    GroupRun run(2);
    std::atomic<int> num_made{0};
    std::atomic<Clock::time_point> decided{Clock::now()};
    Delays delays;
    run.start([&](Session& session, GenerationInfo info) {
      const auto process_group = session.make_group({.backend = backend}).process_group();
      ++num_made;
      if (info.process == 0) {
        std::vector<at::Tensor> ones{at::full({1000}, 1.0F)};
        EXPECT_ANY_THROW(process_group->allreduce(ones)->wait());
        delays.add(Clock::now() - decided.load());
      } else {
        test::wait_until([&] { return session.must_enter(); });
      }
      session.enter(0);
    });
    run.agents.wait_until([&] { return num_made == 2; });
    decided = Clock::now();
    run.agents.decide(run.ranks);
    run.end(run.ranks);
    EXPECT_LT(delays.percentile(0.5), 100 * test::kSlowdown);
  }
}

}  // namespace
}  // namespace cohort::elastic
