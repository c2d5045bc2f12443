// Whole runs of agents, their processes and a store on a virtual clock. A seed decides who joins, leaves,
// dies and stops, which networks are cut, what is slow, and when the store is away. What must hold, whatever
// happens:
//   one number of a generation has one content; an id has one agent, and a survivor keeps it;
//   the state after a step is the same wherever it is committed, so no virtual rank is counted twice or left
//     out;
//   no generation makes a step that a later one has left, and none makes steps again but the newest few;
//   the ledger has each step once;
//   after the last fault a step is committed within 36 times the silence and 5 s where agents enough live,
//     and one of those that have the state; else within join_timeout and 15 s. In some runs one host stays
//     cut off;
//   the run ends, and each agent hears of that, or finds that nobody can tell it;
//   a run fails only where no process that lives has the newest state, or too few agents live that do not
//     leave; but for the exceptions of may_fail_with_state().
#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <map>
#include <string>

#include "simulated_run.h"
#include "tests/support/environment.h"

namespace cohort::membership {
namespace {

using test::env_number;
using test::Planted;
using test::SimulatedRun;

std::uint64_t num_seeds() {
#ifdef COHORT_IS_SANITIZED
  return env_number("COHORT_SEEDS", 50);
#else
  return env_number("COHORT_SEEDS", 500);
#endif
}

// Each test has seeds of its own, so that they can run side by side.
SimulatedRun::Counts run_seeds(bool is_embedded, std::uint64_t part) {
  SimulatedRun::Counts sum;
  const std::uint64_t first = env_number("COHORT_FIRST_SEED", 1 + part * num_seeds());
  for (std::uint64_t seed = first; seed < first + num_seeds(); ++seed) {
    SimulatedRun run({.seed = seed, .is_embedded = is_embedded});
    const std::string error = run.run();
    EXPECT_EQ(error, "") << "COHORT_FIRST_SEED=" << seed << " COHORT_SEEDS=1 COHORT_TRACE=1";
    if (!error.empty()) break;
    if (run.counts.unexplained > 0) std::cout << "seed " << seed << " failed with its state" << std::endl;
    sum.add(run.counts);
  }
  std::cout << sum.text() << std::endl;
  return sum;
}

// What happens seldom must happen, or the simulator shows nothing.
void expect_enough(const SimulatedRun::Counts& counts) {
  if (num_seeds() < 500) return;  // a person looks at some seeds
  EXPECT_GT(counts.generations, num_seeds() * 3 / 2);
  EXPECT_GT(counts.planned, num_seeds() / 4);
  EXPECT_GT(counts.copies, num_seeds() / 2);
  EXPECT_GT(counts.restarts, num_seeds() / 8);
  EXPECT_GT(counts.redone, 0U);
  EXPECT_GT(counts.dropped_alive, num_seeds() / 10);
  EXPECT_GT(counts.lost_links, num_seeds() / 4);
  EXPECT_GT(counts.stopped, num_seeds() / 10);
  EXPECT_GT(counts.hung, 0U);
  EXPECT_GT(counts.gave_up, 0U);
  EXPECT_GT(counts.lost_states, 0U);
  EXPECT_GT(counts.late_commits, 0U);
  EXPECT_GT(counts.cut_off, num_seeds() / 40);
  EXPECT_GT(counts.quick_runs, num_seeds() / 50);
  EXPECT_LE(counts.unexplained, num_seeds() / 2000);
  EXPECT_LT(counts.side_by_side, 1 + num_seeds() / 500);
  EXPECT_LT(counts.failed_runs, num_seeds() * 3 / 10)
      << "a run fails where no process has its state any more";
}

void run_with_an_embedded_record(std::uint64_t part) {
  const SimulatedRun::Counts counts = run_seeds(true, part);
  expect_enough(counts);
  if (num_seeds() < 500) return;
  EXPECT_GE(counts.lost_endpoints, num_seeds() / 2000);  // about one of 300
  EXPECT_LT(counts.lost_endpoints, num_seeds() / 20) << "such a run shows little";
}

void run_with_a_common_store(std::uint64_t part) {
  const SimulatedRun::Counts counts = run_seeds(false, part);
  expect_enough(counts);
  if (num_seeds() < 500) return;
  EXPECT_GT(counts.two_deciders, num_seeds() / 20);
  EXPECT_GT(counts.handovers, 0U);
}

TEST(MembershipSimulationTest, RunsWithAnEmbeddedRecordKeepTheirPromises) {
  run_with_an_embedded_record(0);
}
TEST(MembershipSimulationTest, RunsWithAnEmbeddedRecordKeepTheirPromisesToo) {
  run_with_an_embedded_record(1);
}
TEST(MembershipSimulationTest, RunsWithAStoreThatAllReachKeepTheirPromises) {
  run_with_a_common_store(0);
}
TEST(MembershipSimulationTest, RunsWithAStoreThatAllReachKeepTheirPromisesToo) {
  run_with_a_common_store(1);
}

TEST(MembershipSimulationTest, ASeedIsOneRun) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SimulatedRun a({.seed = seed, .is_embedded = false}), b({.seed = seed, .is_embedded = false});
    EXPECT_EQ(a.run(), b.run());
    EXPECT_EQ(a.world().num_events(), b.world().num_events());
    EXPECT_EQ(a.counts.text(), b.counts.text());
  }
}

// A simulator that finds no fault which is there shows nothing.
TEST(MembershipSimulationTest, PlantedFaultsAreFound) {
  struct Fault {
    Planted planted;
    bool is_embedded;
    const char* found;  // a piece of the message
  };
  const Fault faults[] = {
      {Planted::kBlindSwap, false, "given to two agents"},
      {Planted::kMixedSteps, true, ""},
      {Planted::kNoStateCopy, true, "other"},
      {Planted::kNoEarlyMessages, true, ""},
      {Planted::kLateLedger, true, "the ledger lacks step"},
      {Planted::kDirtyState, true, "is another one"},
      {Planted::kLossUnnoticed, true, "are made again"},
      {Planted::kNoHolders, false, "side by side"},
      {Planted::kTwoContents, false, "has two contents"},
      {Planted::kUnheardEnd, true, "has not heard of the end"},
      {Planted::kLateEntry, true, "have left"},
  };
  for (const Fault& fault : faults) {
    std::string error;
    std::uint64_t seed = 1;
    for (; seed <= 2000 && error.empty(); ++seed) {
      error = SimulatedRun({.seed = seed, .is_embedded = fault.is_embedded, .planted = fault.planted}).run();
    }
    EXPECT_NE(error, "") << "fault " << static_cast<int>(fault.planted) << " was not found";
    EXPECT_NE(error.find(fault.found), std::string::npos) << static_cast<int>(fault.planted) << ": " << error;
    std::cout << "fault " << static_cast<int>(fault.planted) << ", seed " << seed - 1 << ": " << error
              << std::endl;
  }
}

// Until the first generation, and to replace one member: messages for each agent.
TEST(MembershipSimulationTest, AGenerationTakesMessagesInProportionToTheAgents) {
  std::map<int, double> per_agent;
  for (const int num_hosts : {16, 256}) {
    SimulatedRun run({.seed = 1, .has_faults = false, .num_hosts = num_hosts});
    EXPECT_EQ(run.run_to_generation(), "");
    EXPECT_EQ(run.store().record()->generation.members.size(), static_cast<std::size_t>(num_hosts));
    const auto first = run.num_agent_messages();
    EXPECT_LE(run.store().num_swaps(), 30U) << "agents that join are collected";
    EXPECT_EQ(run.replace_a_member(), "");
    const auto second = run.num_agent_messages() - first;
    per_agent[num_hosts] = static_cast<double>(first + second) / num_hosts;
    std::cout << num_hosts << " agents: " << first << " messages to the first generation, " << second
              << " to the next" << std::endl;
  }
  EXPECT_LT(per_agent[256], 1.3 * per_agent[16]);
}

}  // namespace
}  // namespace cohort::membership
