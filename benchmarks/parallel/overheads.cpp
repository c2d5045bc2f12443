// What hooks and bookkeeping of Reducer cost: 200 parameters of 1,000 floats whose backward does next to
// nothing, at world size 1 (nothing travels) and as rank 0 of 2 of the backend fake (gradients are brought
// into buckets, and the sum costs next to nothing). Beside it c10d::Reducer, and backward alone.
//
// Run: parallel_overheads [steps, 2000]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "cohort/parallel/reducer.h"

namespace {

namespace comm = cohort::comm;
namespace parallel = cohort::parallel;
using Clock = std::chrono::steady_clock;

constexpr int kTensors = 200;

struct Times {
  double min = 0, median = 0, p99 = 0;  // us of a step
};

Times run(std::vector<at::Tensor>& parameters, int steps, const std::function<void()>& before) {
  const at::Tensor gradient = at::ones({1000});
  std::vector<double> times;
  for (int step = 0; step < steps; ++step) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
    // One node with all parameters below it.
    const at::Tensor loss = at::cat(parameters).sum();
    before();
    const auto start = Clock::now();
    loss.backward();
    if (step >= steps / 2)
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2], times[times.size() * 99 / 100]};
}

comm::Group make_group(int size) {
  return comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, size, "fake", std::chrono::minutes(5),
                          "127.0.0.1", comm::Check::kOff);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 2000;
  at::set_num_threads(1);
  std::vector<at::Tensor> parameters;
  std::vector<parallel::NamedParameter> named;
  for (int i = 0; i < kTensors; ++i) {
    parameters.push_back(at::ones({1000}).requires_grad_());
    named.push_back({"p" + std::to_string(i), parameters.back()});
  }
  const Times alone = run(parameters, steps, [] {});
  std::printf("%-34s %9s %9s %9s %22s\n", "", "min us", "median us", "p99 us", "us per tensor, above");
  const auto report = [&](const char* name, const Times& times) {
    std::printf("%-34s %9.1f %9.1f %9.1f %22.3f\n", name, times.min, times.median, times.p99,
                (times.median - alone.median) / kTensors);
  };
  report("backward alone", alone);
  for (const int size : {1, 2}) {
    const std::string ranks = ", world size " + std::to_string(size);
    {
      parallel::Reducer reducer(make_group(size), named, {.plan = parallel::BucketPlan::kArrival});
      report(("Reducer" + ranks).c_str(), run(parameters, steps, [&] { reducer.prepare(); }));
    }
    {
      comm::Group group = make_group(size);
      auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {1 << 20, 25 << 20});
      std::reverse(buckets.begin(), buckets.end());
      c10d::Reducer reducer(parameters, buckets, group.process_group(), std::vector<bool>(kTensors, false),
                            25 << 20, false, true, {}, 1 << 20, false, false, {});
      report(("c10d::Reducer" + ranks).c_str(), run(parameters, steps, [&] {
               reducer.prepare_for_forward();
               if (reducer.should_rebuild_buckets()) reducer.rebuild_buckets();
               reducer.prepare_for_backward({});
             }));
    }
  }
}
