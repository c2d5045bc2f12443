// Faults of all kinds at times that a seed chooses, on hosts of its own. Always: the rank of host 0 has the
// state, or another one that nothing disturbs. Host 0 has the record, so its agent lives. A host is not cut
// off for as long as its agent would wait for the endpoint.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <iostream>
#include <random>
#include <set>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/netns/netns.h"
#include "tests/cli/netns/virtual_run.h"
#include "tests/support/seeds.h"

namespace cohort::test {
namespace {

using base::concat;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kHosts = 4, kEvents = 10, kMaxPauseMs = 500;
constexpr milliseconds kLongestCut(2'500);  // of 6 s for which an agent waits for the endpoint

class FaultSchedule {
 public:
  explicit FaultSchedule(std::uint64_t seed) : random_(seed), run_({.num_hosts = kHosts, .seed = seed}) {}

  /// Returns what does not hold; empty: nothing.
  std::string play() {
    std::set<int> all;
    for (int host = 0; host < kHosts; ++host) {
      run_.start(host);
      all.insert(host);
    }
    if (!run_.come_to_train(all)) return "not all train before the first fault";
    for (int i = 0; i < kEvents; ++i) {
      if (is_cut_ && Clock::now() - cut_since_ > kLongestCut) heal();
      make_event();
      if (!run_.agent(0).worker().running() || run_.agent(0).worker().reap())
        return "the agent of host 0 has ended";
      ::poll(nullptr, 0, static_cast<int>(pick(kMaxPauseMs)));  // the time between two events
    }
    heal();
    run_.forget_points();
    for (const pid_t pid : stopped_) ::kill(pid, SIGCONT);
    for (const int host : dead_) all.erase(host);
    // Whoever was cut off comes back: an agent that misses the end of the run takes the endpoint for dead.
    if (!run_.come_to_train(all)) return "not all who live train after the last fault";
    return run_.finish(all);
  }
  std::string story() const { return story_ + run_.story(); }

 private:
  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  int pick_host() { return 1 + static_cast<int>(pick(kHosts - 1)); }
  void tell(const std::string& line) { story_ += concat("at step ", run_.steps(), ": ", line, "\n"); }

  void make_event() {
    const int host = pick_host(), other = (host + 1 + static_cast<int>(pick(kHosts - 1))) % kHosts;
    switch (pick(10)) {
      case 0:
        note_cut(concat("host ", host, " is cut off"));
        return run_.hosts().isolate(host);
      case 1:
        note_cut(concat("nothing comes from host ", other, " to host ", host));
        return run_.hosts().cut_one_way(other, host);
      case 2:
        note_cut(concat("hosts ", host, " and ", other, " do not reach each other"));
        return run_.hosts().cut(host, other);
      case 3:
        tell(concat("links of host ", host, " are bad"));
        return run_.hosts().set_links_of(host, {.lost = 0.05, .repeated = 0.1, .delay = milliseconds(2)});
      case 4:
        return kill_agent(host, pick(2) == 0);
      case 5:
        return kill_rank();
      case 6:
        return stop_or_continue(host, pick(2) == 0);
      case 7:
        return act_at(host);
      case 8:
        return start_again();
      default:
        return heal();
    }
  }

  void note_cut(const std::string& line) {
    tell(line);
    if (!std::exchange(is_cut_, true)) cut_since_ = Clock::now();
  }
  void heal() {
    tell("all links are healed");
    run_.hosts().heal();
    is_cut_ = false;
  }

  void kill_agent(int host, bool is_silent) {
    if (dead_.contains(host)) return;
    tell(concat("the agent of host ", host, " is killed", is_silent ? ", and nobody is told" : ""));
    if (is_silent) {
      note_cut("so the host is cut off");
      run_.fail_host(host);
    } else {
      run_.agent(host).worker().kill();
      run_.agent(host).wait();
    }
    dead_.insert(host);
  }
  void start_again() {
    for (const int host : dead_) {
      tell(concat("host ", host, " starts again"));
      run_.start(host);
    }
    dead_.clear();
  }
  // The rank of any host, where another one has the state for sure.
  void kill_rank() {
    const auto ranks = run_.newest().ranks;
    if (is_cut_ || has_points_ || !stopped_.empty() || ranks.size() < 2 || !run_.make_steps(2)) return;
    if (run_.newest().ranks != ranks) return;
    auto victim = ranks.begin();
    std::advance(victim, static_cast<std::ptrdiff_t>(pick(ranks.size())));
    tell(concat("the rank of host ", victim->first, " is killed"));
    ::kill(victim->second, SIGKILL);
  }
  void stop_or_continue(int host, bool is_agent) {
    if (!stopped_.empty()) {
      tell("who was stopped continues");
      for (const pid_t pid : stopped_) ::kill(pid, SIGCONT);
      return stopped_.clear();
    }
    const auto ranks = run_.newest().ranks;
    if (dead_.contains(host) || !ranks.contains(host)) return;
    tell(concat("the ", is_agent ? "agent" : "rank", " of host ", host, " is stopped"));
    stopped_.insert(is_agent ? run_.agent(host).worker().pid() : ranks.at(host));
    for (const pid_t pid : stopped_) ::kill(pid, SIGSTOP);
  }
  void act_at(int host) {
    static const std::vector<std::string> points{"entered",  "hello",   "state copy", "copied",
                                                 "exchange", "changes", "commit"};
    const std::string& point = points[pick(points.size())];
    tell(concat("at \"", point, "\" the rank of host ", host, " will be killed"));
    run_.act_at(host, point, "kill rank");
    has_points_ = true;
  }

  std::mt19937_64 random_;
  VirtualRun run_;
  std::set<int> dead_;  // hosts without an agent
  std::set<pid_t> stopped_;
  bool is_cut_ = false, has_points_ = false;
  Clock::time_point cut_since_;
  std::string story_;
};

class NetnsSchedulesTest : public NetnsTest {};

TEST_F(NetnsSchedulesTest, AnyScheduleOfFaultsKeepsTheBits) {
  const Seeds seeds = Seeds::usual(2);
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    FaultSchedule schedule(seed);
    const std::string wrong = schedule.play();
    ASSERT_EQ(wrong, "") << "seed " << seed << "\n" << schedule.story();
    if (std::getenv("COHORT_TRACE") != nullptr) std::cout << schedule.story();
  }
}

}  // namespace
}  // namespace cohort::test
