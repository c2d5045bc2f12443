// Processes that die leave their state to others, also where no process is left that has it. Each test makes
// its zygote first: before this process has threads.
#include <gtest/gtest.h>

#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/elastic/internal/region_file.h"
#include "fake_agents.h"
#include "mlp_process.h"
#include "tests/elastic/mlp.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using test::env_number;
using test::FakeAgents;
using test::run_mlp;
using test::run_mlp_child;
using test::Zygote;

// Nobody else has the state: a successor continues with what the dead process has left. Only where it died
// while it changed its state that state is lost, and the run says so.
void expect_kept_state(int max_processes, int virtual_ranks, std::uint64_t total_steps) {
  Zygote zygote(run_mlp_child);
  const std::uint64_t first = env_number("COHORT_FIRST_SEED", 1), count = env_number("COHORT_SEEDS", 8);
  const std::string expected = run_mlp({.virtual_ranks = virtual_ranks, .total_steps = total_steps});
  int kills = 0, heirs = 0, lost = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    FakeAgents agents(zygote, {.seed = seed,
                               .total_steps = total_steps,
                               .virtual_ranks = virtual_ranks,
                               .max_processes = max_processes,
                               .loses_last = true});
    const std::string error = agents.run();
    if (base::env_bool("COHORT_TRACE").value_or(false)) std::cout << agents.story();
    kills += agents.counts.kills;
    heirs += agents.counts.heirs;
    lost += error == FakeAgents::kStateLost ? 1 : 0;
    EXPECT_EQ(agents.find_forgotten(), "") << "seed " << seed << "\n" << agents.story();
    if (error == FakeAgents::kStateLost) continue;
    ASSERT_EQ(error, "") << "seed " << seed << "\n" << agents.story();
    const std::vector<std::string> results = agents.results();
    ASSERT_FALSE(results.empty());
    for (const std::string& result : results) {
      ASSERT_TRUE(result == expected) << "seed " << seed << ": other bits\n" << agents.story();
    }
  }
  std::cout << count << " schedules: " << kills << " processes killed, " << heirs
            << " began with what another one had left, " << lost
            << " runs lost their state as it was being changed\n";
  EXPECT_GE(heirs, static_cast<int>(count / 2));
  EXPECT_LT(lost, static_cast<int>(count));
}

TEST(ElasticRegionsTest, AnySuccessorOfAProcessThatWasAloneKeepsTheBits) {
  expect_kept_state(1, 2, 150);
}

TEST(ElasticRegionsTest, AnyNumberOfProcessesMayDieAtOnce) {
  expect_kept_state(3, 4, 120);
}

// The only process is killed at a point, and its successor at another one.
TEST(ElasticRegionsTest, AKillAtEachPointLeavesAWholeStateOrNone) {
  Zygote zygote(run_mlp_child);
  const std::string expected = run_mlp({.virtual_ranks = 2, .total_steps = 20});
  struct Point {
    const char *first, *of_heir;
    bool is_kept;
  };
  for (const auto& [first, of_heir, is_kept] : {Point{"changes:4", "", false},
                                                {"stepped:4", "", false},
                                                {"commit:4", "", false},
                                                {"record:30", "", false},
                                                {"before word:4", "", false},
                                                {"committed:4", "", true},
                                                {"finished:1", "", true},
                                                {"committed:6", "taken over:1", true},
                                                {"committed:5", "entered:1", true},
                                                {"committed:5", "before word:1", true},
                                                {"committed:5", "committed:1", true}}) {
    SCOPED_TRACE(base::concat(first, " ", of_heir));
    FakeAgents agents(zygote, {.total_steps = 20, .virtual_ranks = 2});
    const auto kill_at_point = [&](FakeAgents::Child& child, std::uint64_t known_steps) {
      // What an agent has not heard of is not missed: those steps are made again.
      agents.handle_until([&] { return child.is_asking && child.status.committed_steps >= known_steps; },
                          "a process at its point");
      agents.kill(child);
      agents.handle_until([&] { return child.has_ended; }, "the end of a process");
    };
    const auto enter = [&](const char* point, FakeAgents::Child* before) -> FakeAgents::Child& {
      FakeAgents::Child& child = agents.start(point);
      agents.give_region(child, before);
      agents.handle_until([&] { return child.status.is_ready || child.is_asking; }, "a process");
      agents.decide({&child}, false, "a process takes the place of another one");
      return child;
    };
    FakeAgents::Child* last = &enter(first, nullptr);
    kill_at_point(*last, 2);
    const CommitWord left = read_commit_word(last->region);
    EXPECT_EQ(left.phase, is_kept ? CommitWord::Phase::kCommitted : CommitWord::Phase::kChanging);
    if (*of_heir != 0) {
      last = &enter(of_heir, last);
      kill_at_point(*last, 0);
      EXPECT_EQ(read_commit_word(last->region), left) << "what it has taken over stays";
    }
    FakeAgents::Child& heir = enter("", last);
    const auto has_finished = [&] { return heir.status.is_finished; };
    if (!is_kept) {
      COHORT_EXPECT_THROW_WITH(agents.handle_until(has_finished, "all steps"), std::runtime_error,
                               "that the state is lost");
      continue;
    }
    agents.handle_until(has_finished, "all steps");
    agents.end_run(true);
    const std::vector<std::string> results = agents.results();
    ASSERT_EQ(results.size(), 1U);
    EXPECT_TRUE(results[0] == expected) << agents.story();
  }
}

// Nobody is left who could tell it.
TEST(ElasticRegionsTest, ASuccessorComputesWithTheThreadsOfTheProcessBefore) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 20, .virtual_ranks = 2});
  FakeAgents::Child& first = agents.start("committed:4");
  agents.give_region(first);
  agents.handle_until([&] { return first.status.is_ready; }, "a process");
  agents.decide({&first}, false, "the start");
  agents.handle_until([&] { return first.is_asking; }, "a process at its point");
  agents.kill(first);
  agents.handle_until([&] { return first.has_ended; }, "the end of a process");
  agents.variables["TEST_THREADS"] = "3";
  FakeAgents::Child& heir = agents.start();
  agents.give_region(heir, &first);
  agents.handle_until([&] { return heir.status.is_ready; }, "its successor");
  agents.decide({&heir}, false, "a process takes the place of another one");
  agents.handle_until([&] { return heir.status.is_finished; }, "all steps");
  agents.end_run(true);
  EXPECT_NE(agents.story().find("computes with 1 threads, as the process before it, and not 3"),
            std::string::npos)
      << agents.story();
}

// It lacks the state then, and has it from another one.
TEST(ElasticRegionsTest, ASuccessorThatCannotTakeTheStateOverSaysThatItHasNone) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 60, .plant = "reject"});
  FakeAgents::Child &survivor = agents.start(), &victim = agents.start("committed:5");
  agents.handle_until([&] { return survivor.status.is_ready && victim.status.is_ready; }, "two processes");
  agents.decide({&survivor, &victim}, false, "the start");
  agents.handle_until([&] { return victim.is_asking; }, "a process at its point");
  agents.kill(victim);
  agents.handle_until([&] { return victim.has_ended; }, "the end of a process");
  FakeAgents::Child& heir = agents.start();
  agents.give_region(heir, &victim);
  agents.handle_until([&] { return heir.status.is_ready; }, "a successor");
  agents.decide({&survivor, &heir}, false, "a process was killed");
  agents.handle_until([&] { return survivor.status.is_finished && heir.status.is_finished; }, "all steps");
  agents.end_run(true);
  EXPECT_NE(agents.story().find("the state that the process before has left does not fit: [test] rejected"),
            std::string::npos)
      << agents.story();
  const std::string expected = run_mlp({.total_steps = 60});
  const std::vector<std::string> results = agents.results();
  ASSERT_EQ(results.size(), 2U);
  for (const std::string& result : results) EXPECT_TRUE(result == expected);
}

}  // namespace
}  // namespace cohort::elastic
