#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <random>
#include <set>
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

// Each test makes its zygote first: before this process has threads.

TEST(ElasticProcessesTest, AnyScheduleOfFaultsKeepsTheBits) {
  Zygote zygote(run_mlp_child);
  const std::uint64_t first = env_number("COHORT_FIRST_SEED", 1), count = env_number("COHORT_SEEDS", 5);
  FakeAgents::Counts sums;
  std::map<int, std::string> expected_by_hidden;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    // Short slices are copied, and long ones are read from the sender's memory.
    std::mt19937_64 random(seed);
    const auto choose = [&](auto small, auto large) { return random() % 2 == 0 ? small : large; };
    FakeAgents::Options options{.seed = seed, .total_steps = 120, .virtual_ranks = 6, .max_ranks = 3};
    options.hidden = choose(64, 512);
    options.bucket_bytes = choose(std::int64_t{8'192}, std::int64_t{25} << 20);
    options.chunk_bytes = choose(std::uint64_t{4'096}, std::uint64_t{4} << 20);
    std::string& expected = expected_by_hidden[options.hidden];
    if (expected.empty()) {
      expected = run_mlp({.virtual_ranks = 6, .total_steps = 120, .hidden = options.hidden});
    }
    FakeAgents agents(zygote, options);
    ASSERT_EQ(agents.run(), "") << "seed " << seed << "\n" << agents.story();
    const std::vector<std::string> results = agents.results();
    ASSERT_FALSE(results.empty());
    for (const std::string& result : results) {
      ASSERT_TRUE(result == expected) << "seed " << seed << ": other bits\n" << agents.story();
    }
    if (base::env_bool("COHORT_TRACE").value_or(false)) std::cout << agents.story();
    sums.generations += agents.counts.generations;
    sums.planned += agents.counts.planned;
    sums.kills += agents.counts.kills;
    sums.kills_at_points += agents.counts.kills_at_points;
    sums.holds += agents.counts.holds;
    sums.stops += agents.counts.stops;
    sums.joins += agents.counts.joins;
  }
  std::cout << count << " schedules: " << sums.generations << " generations, " << sums.planned
            << " of them planned; " << sums.kills << " processes killed, " << sums.kills_at_points
            << " of them at points; " << sums.holds << " held at points; " << sums.stops << " stopped; "
            << sums.joins << " started later\n";
  EXPECT_GT(sums.kills, 0);
  EXPECT_GT(sums.planned, 0);
}

TEST(ElasticProcessesTest, AllBeginWithTheStateOfOneProcess) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 5});
  std::vector<FakeAgents::Child*> all;
  for (const char* const seed : {"1", "2", "3"}) all.push_back(&agents.start("", seed));
  agents.handle_until(
      [&] { return all[0]->status.is_ready && all[1]->status.is_ready && all[2]->status.is_ready; },
      "three processes");
  agents.decide(all, false, "the start");
  agents.handle_until(
      [&] { return all[0]->status.is_finished && all[1]->status.is_finished && all[2]->status.is_finished; },
      "five steps");
  agents.end_run(true);
  const std::vector<std::string> results = agents.results();
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(std::set<std::string>(results.begin(), results.end()).size(), 1U);
}

TEST(ElasticProcessesTest, AllComputeWithTheThreadsOfTheFirstOne) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 5});
  FakeAgents::Child& first = agents.start();
  agents.variables["TEST_THREADS"] = "3";
  FakeAgents::Child& second = agents.start();
  agents.handle_until([&] { return first.status.is_ready && second.status.is_ready; }, "two processes");
  agents.decide({&first, &second}, false, "the start");
  agents.handle_until([&] { return first.status.is_finished && second.status.is_finished; }, "all steps");
  agents.end_run(true);
  EXPECT_NE(agents.story().find("computes with 1 threads, as process 0, and not 3"), std::string::npos);
  const std::string expected = run_mlp({.total_steps = 5});
  for (const std::string& result : agents.results()) EXPECT_TRUE(result == expected);
}

TEST(ElasticProcessesTest, AStateThatIsNotTakenOverShowsInTheBits) {
  Zygote zygote(run_mlp_child);
  for (const char* const plant : {"", "no load"}) {
    FakeAgents agents(zygote, {.total_steps = 100, .plant = plant});
    FakeAgents::Child &first = agents.start(), &joining = agents.start();
    agents.handle_until([&] { return first.status.is_ready && joining.status.is_ready; }, "two processes");
    agents.decide({&first}, false, "the start");
    agents.handle_until([&] { return first.status.committed_steps >= 3; }, "three steps");
    agents.decide({&first, &joining}, true, "a process joins");
    agents.handle_until([&] { return first.status.is_finished && joining.status.is_finished; }, "all steps");
    agents.end_run(true);
    const std::string expected = run_mlp({.total_steps = 100});
    const std::vector<std::string> results = agents.results();
    ASSERT_EQ(results.size(), 2U);
    for (const std::string& result : results) EXPECT_EQ(result == expected, plant == std::string()) << plant;
  }
}

// Of two processes one drops a step that the other one finishes, from the memory of the first one. The
// processes stop at each exchange of a step in turn, until the plant shows: there, bits must be right without
// it.
TEST(ElasticProcessesTest, MemoryThatIsWrittenAgainShowsInTheBits) {
  Zygote zygote(run_mlp_child);
  const std::string expected = run_mlp({.total_steps = 8, .hidden = 512});
  const auto has_right_bits = [&](const std::string& plant, int exchange) {
    FakeAgents agents(
        zygote, {.total_steps = 8, .hidden = 512, .bucket_bytes = std::int64_t{25} << 20, .plant = plant});
    const std::string point = base::concat("exchange:", exchange);
    FakeAgents::Child &first = agents.start(point), &second = agents.start(point);
    agents.handle_until([&] { return first.status.is_ready && second.status.is_ready; }, "two processes");
    agents.decide({&first, &second}, false, "the start");
    agents.handle_until([&] { return first.is_asking && second.is_asking; }, "their points");
    agents.release(first);
    agents.decide({&first, &second}, false, "a test");
    agents.handle_until([&] { return first.status.entered == 2; }, "a process that drops its step");
    agents.release(second);
    agents.handle_until([&] { return first.status.is_finished && second.status.is_finished; }, "all steps");
    agents.end_run(true);
    const std::vector<std::string> results = agents.results();
    EXPECT_EQ(results.size(), 2U);
    return std::ranges::all_of(results, [&](const std::string& result) { return result == expected; });
  };
  // The second and third step.
  int found = 0;
  for (int exchange = 8; exchange < 18 && found == 0; ++exchange) {
    if (!has_right_bits("memory is written again", exchange)) found = exchange;
  }
  ASSERT_NE(found, 0) << "nobody reads memory of a step that was dropped";
  EXPECT_TRUE(has_right_bits("", found)) << found;
}

TEST(ElasticProcessesTest, ASlowProcessIsNamedOnceAndSoIsItsRecovery) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 200, .plant = "slow"});
  std::vector<FakeAgents::Child*> all{&agents.start(), &agents.start(), &agents.start()};
  const auto all_are = [&](bool membership::RankStatus::*flag) {
    return std::ranges::all_of(all, [&](const auto* child) { return child->status.*flag; });
  };
  agents.handle_until([&] { return all_are(&membership::RankStatus::is_ready); }, "three processes");
  agents.decide(all, false, "the start");
  agents.handle_until([&] { return all_are(&membership::RankStatus::is_finished); }, "all steps");
  agents.end_run(true);
  const std::string story = agents.story(), name = "process 1 (local rank 0 of agent 2 at ";
  const std::size_t slow = story.find(") is slow: its median step takes ");
  ASSERT_NE(slow, std::string::npos) << story;
  EXPECT_NE(story.rfind(name, slow), std::string::npos) << story;
  EXPECT_EQ(story.find(" is slow: ", slow + 10), std::string::npos) << story;
  EXPECT_NE(story.find(") is not slow any more: its median step takes ", slow), std::string::npos) << story;
}

TEST(ElasticProcessesTest, AStateThatNobodyHasIsNoticed) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 1'000'000});
  FakeAgents::Child &holder = agents.start(), &other = agents.start();
  agents.handle_until([&] { return holder.status.is_ready && other.status.is_ready; }, "two processes");
  agents.decide({&holder}, false, "the start");
  agents.handle_until([&] { return holder.status.committed_steps >= 3; }, "three steps");
  agents.kill(holder);
  agents.handle_until([&] { return holder.has_ended; }, "the end of a process");
  agents.decide({&other}, false, "the only one with the state is gone");
  COHORT_EXPECT_THROW_WITH(agents.handle_until([] { return false; }, ""), std::runtime_error,
                           "that the state is lost");
  EXPECT_TRUE(other.status.is_state_lost);
  EXPECT_EQ(other.status.recovered, 0U);
}

// Its agent does not see that it is stopped. net's silence of 2 s does.
TEST(ElasticProcessesTest, ASilentProcessIsALostLinkAndComesBack) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 300});
  FakeAgents::Child &survivor = agents.start(), &silent = agents.start();
  agents.handle_until([&] { return survivor.status.is_ready && silent.status.is_ready; }, "two processes");
  agents.decide({&survivor, &silent}, false, "the start");
  agents.handle_until([&] { return survivor.status.committed_steps >= 3; }, "three steps");
  ::kill(silent.pid, SIGSTOP);
  agents.handle_until([&] { return !survivor.status.lost_links.empty(); }, "a lost link");
  EXPECT_EQ(survivor.status.lost_links, std::vector<membership::MemberId>{silent.id});
  agents.decide({&survivor}, false, "a process is silent");
  agents.handle_until([&] { return survivor.status.recovered == 2; }, "a generation without it");
  ::kill(silent.pid, SIGCONT);
  agents.handle_until([&] { return silent.status.left == 2; }, "a process that knows that it is out");
  agents.decide({&survivor, &silent}, true, "it comes back");
  // A side that was stopped may hold its old connection for a moment: then the new one is lost again, once.
  std::uint64_t newest = 3;
  const auto have_finished = [&] {
    const auto has_lost = [&](const FakeAgents::Child& child) {
      return child.status.entered == newest && !child.status.lost_links.empty();
    };
    if (newest < 6 && (has_lost(survivor) || has_lost(silent))) {
      agents.decide({&survivor, &silent}, false, "its link is lost again");
      ++newest;
    }
    return survivor.status.is_finished && silent.status.is_finished;
  };
  agents.handle_until(have_finished, "all steps");
  agents.end_run(true);
  const std::string expected = run_mlp({.total_steps = 300});
  const std::vector<std::string> results = agents.results();
  ASSERT_EQ(results.size(), 2U);
  for (const std::string& result : results) EXPECT_TRUE(result == expected);
}

TEST(ElasticProcessesTest, ARunThatFailsEndsItsProcesses) {
  Zygote zygote(run_mlp_child);
  FakeAgents agents(zygote, {.total_steps = 1'000'000});
  FakeAgents::Child& member = agents.start();
  FakeAgents::Child& reserve = agents.start();
  agents.handle_until([&] { return member.status.is_ready && reserve.status.is_ready; }, "two processes");
  agents.decide({&member}, false, "the start");
  agents.handle_until([&] { return member.status.committed_steps >= 3; }, "three steps");
  COHORT_EXPECT_THROW_WITH(agents.end_run(false), std::runtime_error, "the run has ended: a test ends it");
}

// A process in reserve takes the place of one that was killed. Run it alone, and on a build with
// optimisation: COHORT_SEEDS kills, and a state of about COHORT_HIDDEN^2 * 8 bytes. COHORT_REGIONS=off: the
// state dies with its process.
TEST(ElasticRecoveryChild, DISABLED_MeasuresTheTimeFromAKillToTheNextStep) {
  using Clock = std::chrono::steady_clock;
  Zygote zygote(run_mlp_child);
  const std::uint64_t kills = env_number("COHORT_SEEDS", 20);
  const bool has_regions = base::env_bool("COHORT_REGIONS").value_or(true);
  FakeAgents agents(zygote, {.total_steps = 100'000'000,
                             .hidden = static_cast<int>(env_number("COHORT_HIDDEN", 64)),
                             .has_regions = has_regions});
  const auto ready = [&] {
    std::vector<FakeAgents::Child*> list = agents.living();
    std::erase_if(list,
                  [](const FakeAgents::Child* child) { return !child->status.is_ready || child->is_killed; });
    return list;
  };
  for (int i = 0; i < 3; ++i) agents.start();
  agents.handle_until([&] { return ready().size() == 3; }, "three processes");
  agents.decide({ready()[0], ready()[1]}, false, "the start");
  std::vector<double> times;
  int num_kept = 0;
  for (std::uint64_t i = 0; i < kills; ++i) {
    const std::uint64_t number = agents.generation().number;
    agents.handle_until(
        [&] {
          const auto members = agents.members();
          return ready().size() >= 3 && std::ranges::all_of(members, [&](const auto* child) {
                   return child->status.recovered == number;
                 });
        },
        "a generation");
    FakeAgents::Child *victim = agents.members()[i % 2], *survivor = agents.members()[1 - i % 2];
    const auto reserve = ready();
    FakeAgents::Child* next = nullptr;
    for (FakeAgents::Child* const child : reserve) {
      if (!child->is_member) next = child;
    }
    const Clock::time_point begin = Clock::now();
    agents.kill(*victim);
    agents.handle_until([&] { return victim->has_ended; }, "the end of a process");
    const CommitWord word = read_commit_word(victim->region);
    num_kept += word.phase == CommitWord::Phase::kCommitted ? 1 : 0;
    if (has_regions) agents.give_region(*next, victim);
    agents.decide({survivor, next}, false, "a process was killed");
    std::uint64_t recovered_at = 0;
    agents.handle_until(
        [&] {
          const bool has_entered =
              survivor->status.recovered == number + 1 && next->status.recovered == number + 1;
          if (has_entered && recovered_at == 0)
            recovered_at = std::max(survivor->status.committed_steps, next->status.committed_steps);
          return has_entered &&
                 std::max(survivor->status.committed_steps, next->status.committed_steps) > recovered_at;
        },
        "a step");
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    agents.start();
  }
  if (base::env_bool("COHORT_TRACE").value_or(false)) std::cout << agents.story();
  std::ranges::sort(times);
  std::cout << kills << " kills: median " << times[times.size() / 2] << " ms, p99 "
            << times[times.size() * 99 / 100] << " ms, max " << times.back() << " ms; " << num_kept
            << " had left their state\n";
}

}  // namespace
}  // namespace cohort::elastic
