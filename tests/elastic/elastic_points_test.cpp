// Three processes, of which each in turn is killed or stopped at each point: all parameters, buffers and
// momentum have the bits of an undisturbed run, and the ledger has each step. CI plays a few of the cases,
// COHORT_SEEDS=1000 all.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "fake_agents.h"
#include "mlp_process.h"
#include "tests/elastic/mlp.h"
#include "tests/support/environment.h"
#include "tests/support/processes/process_state.h"

namespace cohort::elastic {
namespace {

using base::concat;
using std::chrono::milliseconds;
using test::env_number;
using test::FakeAgents;
using test::run_mlp;
using test::run_mlp_child;
using test::Zygote;
using Child = FakeAgents::Child;

constexpr std::uint64_t kSteps = 12;
constexpr std::size_t kProcesses = 3;
constexpr int kMaxLostAgain = 4;  // a side that was stopped may hold its old links for a moment

enum class Fault { kKill, kShortStop, kLongStop };
constexpr std::array<const char*, 3> kFaultNames{"killed", "stopped for 300 ms",
                                                 "stopped until it is given up"};

// Who comes to a point, and when.
struct PointPlace {
  enum class Who { kMember, kEntrant, kSuccessor };
  const char* point;  // NAME:N
  Who who = Who::kMember;
};
constexpr std::array<PointPlace, 14> kPlaces = {{{"entered:1"},
                                                 {"hello:1"},
                                                 {"state copy:1", PointPlace::Who::kEntrant},
                                                 {"copied:1", PointPlace::Who::kEntrant},
                                                 {"exchange:5"},
                                                 {"changes:3"},
                                                 {"stepped:3"},
                                                 {"commit:3"},
                                                 {"moved:1"},
                                                 {"record:9"},
                                                 {"before word:3"},
                                                 {"committed:3"},
                                                 {"taken over:1", PointPlace::Who::kSuccessor},
                                                 {"finished:1"}}};
constexpr std::size_t kCases = kPlaces.size() * kFaultNames.size() * kProcesses;

class ElasticPointsTest : public ::testing::Test {
 protected:
  // Three processes, one of which waits at the point.
  struct Trio {
    Child* victim = nullptr;
    std::vector<Child*> survivors;

    std::vector<Child*> all() const {
      std::vector<Child*> list = survivors;
      list.push_back(victim);
      return list;
    }
  };

  static Child& start(FakeAgents& agents, const std::string& point = "") {
    Child& child = agents.start(point);
    agents.give_region(child);
    return child;
  }
  static void wait_until_ready(FakeAgents& agents, const std::vector<Child*>& processes) {
    agents.handle_until(
        [&] {
          return std::ranges::all_of(processes,
                                     [](const Child* process) { return process->status.is_ready; });
        },
        "processes that are ready");
  }
  static Child& start_successor(FakeAgents& agents, Child& before, const std::string& point = "") {
    agents.kill(before);
    agents.handle_until([&] { return before.has_ended; }, "the end of a process");
    Child& successor = agents.start(point);
    agents.give_region(successor, &before);
    wait_until_ready(agents, {&successor});
    return successor;
  }

  static Trio bring_to_point(FakeAgents& agents, const PointPlace& place, std::size_t number) {
    using Who = PointPlace::Who;
    Trio trio;
    const bool is_member = place.who == Who::kMember, is_entrant = place.who == Who::kEntrant;
    for (std::size_t i = 0; i < kProcesses; ++i) {
      if (i != number) {
        // The others may not be through before a process joins.
        const bool is_held = is_entrant && trio.survivors.empty();
        trio.survivors.push_back(&start(agents, is_held ? "commit:4" : ""));
      } else if (!is_entrant) {
        trio.victim = &start(agents, is_member ? place.point : "committed:4");
      }
    }
    std::vector<Child*> first = trio.survivors;
    if (trio.victim != nullptr)
      first.insert(first.begin() + static_cast<std::ptrdiff_t>(number), trio.victim);
    wait_until_ready(agents, first);
    agents.decide(first, false, "the start");
    if (is_entrant) {
      trio.victim = &start(agents, place.point);
      agents.handle_until([&] { return trio.victim->status.is_ready && trio.survivors[0]->is_asking; },
                          "a process that joins in the fourth step");
      agents.decide(trio.all(), true, "a process joins");
      agents.release(*trio.survivors[0]);
    } else if (place.who == Who::kSuccessor) {
      agents.handle_until([&] { return trio.victim->is_asking; }, "a process that has a state");
      trio.victim = &start_successor(agents, *trio.victim, place.point);
      agents.decide(trio.all(), false, "a process was killed");
    }
    agents.handle_until([&] { return trio.victim->is_asking; }, concat("the point ", place.point));
    return trio;
  }

  // It is at its point all the time.
  static void stop(FakeAgents& agents, Child& child) {
    ::kill(child.pid, SIGSTOP);
    ASSERT_TRUE(base::poll_until([&] { return test::is_stopped(child.pid); },
                                 base::Deadline(std::chrono::seconds(10))));
    agents.release(child);
  }

  static void inject(FakeAgents& agents, Trio& trio, Fault fault) {
    if (fault == Fault::kKill) {
      trio.victim = &start_successor(agents, *trio.victim);
      return agents.decide(trio.all(), false, "a process was killed");
    }
    stop(agents, *trio.victim);
    if (fault == Fault::kShortStop) {
      const base::Deadline end(milliseconds(300));
      agents.handle_until([&] { return end.expired(); }, "the end of a pause");
      ::kill(trio.victim->pid, SIGCONT);
      return;
    }
    agents.decide(trio.survivors, false, "a process is silent");
    const std::uint64_t number = agents.generation().number;
    const auto have_recovered = [&] {
      return std::ranges::all_of(trio.survivors,
                                 [&](const Child* process) { return process->status.recovered == number; });
    };
    agents.handle_until(have_recovered, "a generation without a process");
    ::kill(trio.victim->pid, SIGCONT);
    agents.handle_until([&] { return trio.victim->status.left == number; }, "a process that knows it is out");
    agents.decide(trio.all(), true, "it comes back");
  }

  static void finish(FakeAgents& agents, const Trio& trio) {
    int num_lost = 0;
    const auto is_in = [&](const Child* process) {
      return process->status.entered == agents.generation().number;
    };
    agents.handle_until(
        [&] {
          const std::vector<Child*> all = trio.all();
          const bool is_lost = std::ranges::any_of(all, [&](const Child* process) {
            return is_in(process) && !process->status.lost_links.empty();
          });
          if (is_lost && num_lost++ < kMaxLostAgain) agents.decide(all, false, "its link is lost again");
          return std::ranges::all_of(all, [&](const Child* process) {
            return process->status.is_finished && process->status.recovered == agents.generation().number;
          });
        },
        "all steps");
    agents.end_run(true);
  }
};

TEST_F(ElasticPointsTest, EachFaultAtEachPointKeepsTheBits) {
  Zygote zygote(run_mlp_child);
  const std::string expected = run_mlp({.total_steps = kSteps});
  const std::size_t count = std::min<std::size_t>(env_number("COHORT_SEEDS", 7), kCases);
  std::set<std::string> reached;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t i = k * kCases / count, place = i % kPlaces.size(), round = i / kPlaces.size();
    const std::size_t fault = (round + place) % kFaultNames.size(), number = (round / 3 + place) % kProcesses;
    const std::string name =
        concat("process ", number, " at ", kPlaces[place].point, ": ", kFaultNames[fault]);
    SCOPED_TRACE(name);
    FakeAgents agents(zygote, {.seed = i, .total_steps = kSteps});
    try {
      Trio trio = bring_to_point(agents, kPlaces[place], number);
      reached.insert(name);
      inject(agents, trio, static_cast<Fault>(fault));
      finish(agents, trio);
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    EXPECT_EQ(agents.missing_step(), "") << agents.story();
    const std::vector<std::string> results = agents.results();
    EXPECT_EQ(results.size(), kProcesses) << agents.story();
    for (const std::string& result : results) EXPECT_TRUE(result == expected) << agents.story();
    if (HasFailure()) return;
  }
  EXPECT_EQ(reached.size(), count);
  std::cout << reached.size() << " of " << kCases << " cases\n";
}

}  // namespace
}  // namespace cohort::elastic
