// How late things come between two processes: the answer of a short call while 4 MB replies stream between
// the same two, a caller's TimeoutError, and the stop token of a handler that runs past its deadline. Each
// round makes two fresh processes, and its figure is a 99th percentile. Run: OMP_NUM_THREADS=1 rpc_latency
// [ROUNDS [PART OF A NAME]]
#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <semaphore>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/bench/compare.h"
#include "cohort/bench/timeit.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/call_context.h"
#include "two_processes.h"

namespace {

namespace bench = cohort::bench;
namespace rpc = cohort::rpc;
using bench_rpc::in_two_processes;
using bench_rpc::run_agent;
using bench_rpc::Store;
using Clock = std::chrono::steady_clock;

constexpr int kShortCalls = 2000, kDeadlines = 300;
constexpr std::chrono::milliseconds kTimeout(20);
constexpr std::chrono::seconds kPatience(10);

std::int64_t add_numbers(std::int64_t a, std::int64_t b) {
  return a + b;
}
at::Tensor large_reply() {
  static const at::Tensor large = at::ones({1 << 20});
  return large;
}

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

std::mutex stops_mutex;
std::vector<double> stops;
// Runs until it is asked to stop, and notes how long after the deadline that is: nanoseconds on the clock of
// this host.
void wait_for_stop(std::int64_t deadline) {
  std::binary_semaphore asked(0);
  const std::stop_callback callback(rpc::stop_token(), [&asked] { asked.release(); });
  if (!asked.try_acquire_for(kPatience)) throw std::runtime_error("nobody asks the handler to stop");
  const double late = seconds_since(Clock::time_point(std::chrono::nanoseconds(deadline)));
  const std::lock_guard lock(stops_mutex);
  stops.push_back(late);
}
std::vector<double> stops_so_far() {
  const std::lock_guard lock(stops_mutex);
  return stops;
}

COHORT_REMOTE(add_numbers);
COHORT_REMOTE(large_reply);
COHORT_REMOTE(wait_for_stop);
COHORT_REMOTE(stops_so_far);

double short_calls(rpc::Agent& agent) {
  std::vector<double> times;
  for (int i = 0; i < kShortCalls; ++i) {
    times.push_back(bench::seconds_of([&] { agent.rpc_sync<add_numbers>("w1", 1, 2); }));
  }
  return bench::percentile(times, 0.99);
}

double short_calls_beside_replies(rpc::Agent& agent) {
  std::atomic<int> num_replies{0};
  double figure = 0;
  {
    // Two are on their way at any time.
    const std::jthread stream([&](const std::stop_token& stop) {
      rpc::Future<at::Tensor> reply = agent.rpc_async<large_reply>("w1");
      while (!stop.stop_requested()) {
        rpc::Future<at::Tensor> next = agent.rpc_async<large_reply>("w1");
        reply.get();
        reply = std::move(next);
        ++num_replies;
      }
      reply.get();
    });
    while (num_replies < 10) std::this_thread::yield();
    figure = short_calls(agent);
  }
  if (num_replies < 20) throw std::runtime_error("hardly any reply came meanwhile");
  return figure;
}

// Calls that end by their deadlines, one after the other. Returns how late each error comes.
std::vector<double> end_by_deadlines(rpc::Agent& agent) {
  std::vector<double> late;
  for (int i = 0; i < kDeadlines; ++i) {
    const Clock::time_point deadline = Clock::now() + kTimeout;
    const std::int64_t nanoseconds = std::chrono::nanoseconds(deadline.time_since_epoch()).count();
    try {
      agent.rpc_sync<wait_for_stop>(rpc::to("w1").within(kTimeout), nanoseconds);
    } catch (const cohort::TimeoutError&) {
      late.push_back(seconds_since(deadline));
    }
  }
  if (late.size() != static_cast<std::size_t>(kDeadlines))
    throw std::runtime_error("a call did not time out");
  return late;
}

double late_errors(rpc::Agent& agent) {
  return bench::percentile(end_by_deadlines(agent), 0.99);
}

double late_stops(rpc::Agent& agent) {
  end_by_deadlines(agent);
  std::vector<double> late;
  const Clock::time_point begin = Clock::now();
  while (late.size() < static_cast<std::size_t>(kDeadlines)) {
    if (Clock::now() - begin > kPatience) throw std::runtime_error("a handler was not asked to stop");
    late = agent.rpc_sync<stops_so_far>("w1");
  }
  return bench::percentile(late, 0.99);
}

struct Case {
  const char* name;
  double (*figure)(rpc::Agent&);  // by rank 0
};
struct Group {
  const char* name;
  std::vector<Case> cases;
};

std::vector<Group> groups() {
  return {{"a short call, 99th percentile",
           {{"alone", short_calls}, {"beside 4 MB replies", short_calls_beside_replies}}},
          {"time after a deadline, 99th percentile",
           {{"until the caller has its error", late_errors},
            {"until the handler is asked to stop", late_stops}}}};
}

void compare(const Group& group, const char* transport, const std::string& listen, int rounds) {
  rpc::AgentOptions options;
  options.listen = listen;
  std::vector<bench::Variant> variants;
  for (const Case& work : group.cases) {
    variants.push_back(bench::Variant::sampled(work.name, [work, options] {
      return in_two_processes(
          [&](int rank, const Store& store) { return run_agent(rank, store, options, work.figure); });
    }));
  }
  const bench::Comparison figures = bench::compare(
      variants, bench::CompareOptions().timeit(bench::TimeitOptions().label(group.name).rounds(rounds)));
  const double first = figures.rows.at(0).measurement.median(),
               second = figures.rows.at(1).measurement.median();
  std::printf("%s, %s\n%ssecond less first: %.3f ms\n\n", group.name, transport, figures.text().c_str(),
              (second - first) * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  return bench_rpc::run_workloads(count, arguments, groups, [](const Group& group, int rounds) {
    compare(group, "TCP", "127.0.0.1:0", rounds);
    compare(group, "local socket", "auto", rounds);
  });
}
