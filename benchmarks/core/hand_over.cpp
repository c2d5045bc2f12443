// What handing a function to another thread and back costs: core::TaskThread with threads that have a core
// each, with two threads on one core, from one such thread to another, and beside it a std::async of the
// same. Run: core_hand_over [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "cohort/core/task_thread.h"

namespace {

namespace core = cohort::core;
using Clock = std::chrono::steady_clock;

// Half of a round trip, in us.
void report(const char* name, int rounds, const std::function<void()>& round_trip,
            std::chrono::microseconds pause = std::chrono::microseconds(0)) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    const auto begin = Clock::now();
    round_trip();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / 2);
  }
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[std::min(times.size() - 1, static_cast<std::size_t>(share * double(times.size())))];
  };
  std::printf("%-48s %8.2f %8.2f %8.2f\n", name, times.front(), at(0.5), at(0.99));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5000;
  const std::vector<int> cores = core::CpuSet::of_process().ids();
  const core::CpuSet first({cores.front()}), last({cores.back()});
  const core::Deadline deadline(std::chrono::seconds(150));
  std::printf("one way, us; %zu cores, %d rounds\n%-48s %8s %8s %8s\n", cores.size(), rounds, "", "min",
              "median", "p99");
  {
    core::TaskThread a({.name = "a", .cpus = first}), b({.name = "b", .cpus = last});
    const auto stage = [&] { b.submit("b", [] {}).get(deadline); };
    a.submit("rounds", [&] {
       report("thread to thread, a core each, at once", rounds, stage);
     }).get(deadline);
    a.submit("rounds", [&] {
       report("thread to thread, a core each, after 1 ms", rounds / 5, stage, std::chrono::milliseconds(1));
     }).get(deadline);
    report("from outside, at once", rounds, [&] { a.submit("a", [] {}).get(deadline); });
  }
  {
    core::TaskThread a({.name = "a", .cpus = first}), b({.name = "b", .cpus = first});
    a.submit("rounds", [&] {
       report("thread to thread, one core for both", rounds, [&] { b.submit("b", [] {}).get(deadline); });
     }).get(deadline);
  }
  report("std::async (a thread each time)", rounds / 5, [] { std::async(std::launch::async, [] {}).get(); });
  return 0;
}
