// An agent is killed or stopped at each of its points, the one that decides and another one. The others
// continue without it, and it comes back; or the agent is the one with the only record: then the others end
// with a message, and the same command begins again. Always with the bits of one process alone.
//
// CI plays a few of the cases, COHORT_RANDOM_PROGRAMS=1000 all.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "tests/cli/netns/netns.h"
#include "tests/cli/netns/virtual_run.h"
#include "tests/support/messages.h"
#include "tests/support/net/etcd.h"
#include "tests/support/seeds.h"

namespace cohort::test {
namespace {

using base::concat;
using Hosts = VirtualRun::Hosts;

constexpr std::size_t kCasesOfARun = 6;

struct PointCase {
  std::string point;
  bool is_stop = false;
};

// When another agent's rank has died, and a generation follows.
const std::vector<std::string> kPointsOfAGeneration{"adopted", "record sent", "order sent"};
// When a rank of the agent itself has died.
const std::vector<std::string> kPointsOfARank{"reaped", "loss reported", "rank started", "region given",
                                              "successor"};

// All points, with these before and after those that each agent has. At every other one the agent is stopped
// first: with the first one, or without.
std::vector<PointCase> cases_of(std::vector<std::string> points, const std::vector<std::string>& last,
                                bool begins_with_stop, unsigned usual) {
  for (const auto* const list : {&kPointsOfAGeneration, &kPointsOfARank, &last})
    points.insert(points.end(), list->begin(), list->end());
  std::vector<PointCase> cases;
  for (const bool is_even_stopped : {begins_with_stop, !begins_with_stop}) {
    for (std::size_t i = 0; i < points.size(); ++i)
      cases.push_back({points[i], (i % 2 == 0) == is_even_stopped});
  }
  const Seeds seeds = Seeds::usual(usual);
  cases.erase(cases.begin(),
              cases.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(seeds.first, cases.size())));
  cases.resize(std::min<std::size_t>(seeds.count(), cases.size()));
  return cases;
}

class NetnsPointsTest : public NetnsTest {
 protected:
  const Hosts all{0, 1, 2};

  static VirtualRun::Options options() { return {.silence_ms = 150, .has_agent_points = true}; }
  void start_all(VirtualRun& run) const {
    for (const int host : all) run.start(host);
    EXPECT_TRUE(run.come_to_train(all)) << run.story();
  }

  // The agent of the victim comes to the point.
  static void trigger(VirtualRun& run, const std::string& point, int victim) {
    if (point == "connected") {
      run.agent(victim).worker().kill();
      run.start(victim);
    } else if (point.starts_with("notice")) {
      run.agent(victim).worker().signal(SIGTERM);
    } else {
      const bool is_own = std::ranges::count(kPointsOfARank, point) > 0;
      ::kill(run.newest().ranks.at(is_own ? victim : (victim + 1) % 3), SIGKILL);
    }
  }

  // All three train before and after.
  void play(VirtualRun& run, const PointCase& point_case, int victim) const {
    SCOPED_TRACE(concat("host ", victim, " at \"", point_case.point,
                        "\": ", point_case.is_stop ? "stopped" : "killed"));
    const std::string action = point_case.is_stop ? "stop agent" : "kill agent";
    run.act_at(victim, point_case.point, action);
    trigger(run, point_case.point, victim);
    ASSERT_TRUE(run.has_acted(victim, point_case.point)) << run.story();
    Hosts rest = all;
    rest.erase(victim);
    const VirtualRun::Outcome outcome = run.outcome_of(rest);
    ASSERT_NE(outcome, VirtualRun::Outcome::kNeither) << run.story();
    const bool does_rest_end = outcome == VirtualRun::Outcome::kEnds;
    if (does_rest_end) {
      for (const int host : rest) {
        EXPECT_EQ(run.agent(host).wait(), 1) << run.story();
        expect_in(run.agent(host).err(), {"the run's only record"});
      }
    }
    if (point_case.is_stop) run.agent(victim).worker().signal(SIGCONT);
    const bool is_out = !point_case.is_stop || point_case.point.starts_with("notice");
    if (is_out) run.agent(victim).wait();
    if (!does_rest_end) {
      if (is_out) run.start(victim);
    } else if (is_out || run.outcome_of({victim}) == VirtualRun::Outcome::kEnds) {
      EXPECT_NE(run.agent(victim).wait(), 0) << run.story();
      if (!is_out) expect_in(run.agent(victim).err(), {"the run has failed"});
      EXPECT_EQ(run.begin_anew(), "");
      for (const int host : all) run.start(host);
    } else {  // it has continued alone, and is the only one
      for (const int host : rest) run.start(host);
    }
    ASSERT_TRUE(run.come_to_train(all)) << run.story();
  }

  // The run ends, and the victim dies or stops meanwhile.
  void end(VirtualRun& run, int victim, bool is_stop) const {
    SCOPED_TRACE(concat("host ", victim, is_stop ? " stops" : " dies", " when the run ends"));
    run.act_at(victim, "agent ends", is_stop ? "stop agent" : "kill agent");
    Hosts rest = all;
    rest.erase(victim);
    EXPECT_EQ(run.finish(rest), "") << run.story();
    ASSERT_TRUE(run.has_acted(victim, "agent ends")) << run.story();
    if (is_stop) run.agent(victim).worker().signal(SIGCONT);
    EXPECT_EQ(run.agent(victim).wait(), is_stop ? 0 : 128 + SIGKILL) << run.story();
  }
};

TEST_F(NetnsPointsTest, AnAgentMayDieOrStopAtAnyPoint) {
  struct Step {
    PointCase point_case;
    int victim;
  };
  std::vector<Step> steps;
  for (const PointCase& other : cases_of({}, {"connected", "notice", "notice said"}, true, 1))
    steps.push_back({other, 2});
  for (const PointCase& deciding : cases_of({"swap asked", "before swap"}, {"notice"}, false, 1))
    steps.push_back({deciding, 0});
  for (std::size_t i = 0, num_runs = 0; i < steps.size(); ++num_runs) {
    VirtualRun run(options());
    start_all(run);
    if (HasFailure()) return;
    for (std::size_t k = 0; k < kCasesOfARun && i < steps.size(); ++k, ++i) {
      play(run, steps[i].point_case, steps[i].victim);
      if (HasFailure()) return;
    }
    end(run, num_runs % 4 < 2 ? 2 : 0, num_runs % 2 == 0);
    if (HasFailure()) return;
  }
  std::cout << steps.size() << " points\n";
}

class NetnsEtcdPointsTest : public NetnsPointsTest {};

TEST_F(NetnsEtcdPointsTest, TheAgentThatDecidesMayDieOrStopAtAnyPoint) {
  const std::vector<PointCase> cases =
      cases_of({"swap asked", "before swap"}, {"notice", "notice said"}, true, 1);
  for (std::size_t i = 0; i < cases.size();) {
    VirtualRun::Options with_etcd = options();
    with_etcd.num_hosts = 4;
    with_etcd.endpoint = VirtualHosts::address(3);
    with_etcd.flags = {"--rdzv-backend=etcd", "--rdzv-id=job7"};
    VirtualRun run(with_etcd);
    EtcdCluster etcd(
        {{VirtualHosts::address(3)}, [&](int, const auto& start) { run.hosts().enter(3, start); }});
    start_all(run);
    for (std::size_t k = 0; k < kCasesOfARun && i < cases.size() && !HasFailure(); ++k, ++i) {
      const int deciding = run.newest().first_host;
      play(run, cases[i], deciding);
      EXPECT_NE(run.newest().first_host, deciding) << "who comes back has another id";
    }
    if (HasFailure()) return;
    EXPECT_EQ(run.finish(all), "") << run.story();
    if (HasFailure()) return;
  }
  std::cout << cases.size() << " points\n";
}

}  // namespace
}  // namespace cohort::test
