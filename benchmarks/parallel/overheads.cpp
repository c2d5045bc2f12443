// What hooks and bookkeeping of Reducer cost: 200 parameters of 1,000 floats whose backward does next to
// nothing, at world size 1 (nothing travels) and as rank 0 of 2 of the backend fake (gradients are brought
// into buckets, and the sum costs next to nothing). Beside it c10d::Reducer, and backward alone.
//
// Run: parallel_overheads [steps, 2000]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "benchmarks/parallel/c10d_reducer.h"
#include "cohort/bench/timeit.h"
#include "cohort/parallel/reducer.h"

namespace {

namespace bench = cohort::bench;
namespace comm = cohort::comm;
namespace parallel = cohort::parallel;

constexpr int kTensors = 200;

// A backward, after steps that build the buckets. What comes before it does not count.
bench::Measurement run(const std::string& name, std::vector<at::Tensor>& parameters, int steps,
                       const std::function<void()>& before) {
  return bench::sample(
      [&] {
        for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
        // One node with all parameters below it.
        const at::Tensor loss = at::cat(parameters).sum();
        before();
        return bench::seconds_of([&] { loss.backward(); });
      },
      bench::TimeitOptions().label(name).rounds(steps - steps / 2).warm_up(steps / 2));
}

comm::Group make_group(int size) {
  return comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, size, "fake", std::chrono::minutes(5),
                          "127.0.0.1", comm::ConsistencyCheck::kOff);
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
  const bench::Measurement alone = run("backward alone", parameters, steps, [] {});
  std::printf("%-34s %9s %9s %9s %22s\n", "", "min us", "median us", "p99 us", "us per tensor, above");
  const auto report = [&](const bench::Measurement& measurement) {
    std::printf("%-34s %9.1f %9.1f %9.1f %22.3f\n", measurement.label.c_str(), 1e6 * measurement.best(),
                1e6 * measurement.median(), 1e6 * measurement.percentile(0.99),
                1e6 * (measurement.median() - alone.median()) / kTensors);
  };
  report(alone);
  for (const int size : {1, 2}) {
    const std::string ranks = ", world size " + std::to_string(size);
    {
      parallel::Reducer reducer(make_group(size), named, {.plan = parallel::BucketPlan::kArrival});
      report(run("Reducer" + ranks, parameters, steps, [&] { reducer.prepare(); }));
    }
    {
      comm::Group group = make_group(size);
      const auto reducer = bench::make_c10d(parameters, group);
      report(run("c10d::Reducer" + ranks, parameters, steps, [&] { bench::prepare(*reducer); }));
    }
  }
}
