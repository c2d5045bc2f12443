// How much of the communication of gradients a step hides behind its backward, on an emulated link: each
// all-reduce takes latency + bytes / bandwidth, one after the other, and no core. Side by side in one run:
// Reducer, Reducer without overlap, c10d::Reducer with PyTorch's bucket sizes, and no communication at all;
// then the step in script mode, whose backward hands gradients on as it runs, or all at its end.
//
// Run: parallel_overlap [mlp|vgg16|resnet50|all] [steps measured, 10] [latency in us, 100] [share in %]
//
// The link is set so that bytes / bandwidth is 25, 50 and 100 % of backward's time, or the share that is
// given. "hidden": (compute + communication - step) / communication, communication being one message of all
// bytes, and compute the same mode's, eager or script. 100 % in the rows without communication is no merit,
// and 0 % without overlap no fault.
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "benchmarks/parallel/c10d_reducer.h"
#include "benchmarks/parallel/workloads.h"
#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"
#include "cohort/parallel/reducer.h"
#include "cohort/script/script.h"
#include "tests/support/net/slow_link.h"

namespace {

namespace script = cohort::script;
namespace comm = cohort::comm;
namespace parallel = cohort::parallel;
using namespace cohort::bench;
using cohort::test::SlowLink;

constexpr int kWarmUp = 20;  // steps until buckets stay

comm::Group make_group(SlowLink::Cost cost) {
  comm::Group group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake",
                                       std::chrono::minutes(5), "127.0.0.1", comm::ConsistencyCheck::kOff);
  SlowLink::under(group, cost);
  return group;
}

// One way to make a step. All of a run hang on the same parameters; only what is prepared reduces.
// `loss` of null: eager.
Variant way(
    const char* name, Net& net, const std::function<void()>& before_backward,
    const std::function<void()>& after_backward = [] {}, const std::function<at::Tensor()>& loss = nullptr) {
  return {name, [&net, before_backward, after_backward, loss] {
            net.zero_grad();
            const at::Tensor value = loss ? loss() : net.loss();
            before_backward();
            value.backward();
            after_backward();
          }};
}

CompareOptions options(int steps) {
  return CompareOptions().timeit(TimeitOptions().calls(1).rounds(steps).warm_up(kWarmUp));
}

void measure(const Workload& work, int steps, std::chrono::microseconds latency,
             const std::vector<double>& shares) {
  Net net(work);
  const auto loss_of = [&net](const at::Tensor& x, const at::Tensor& y) { return net.loss_of(x, y); };
  const auto parameters = net.parameters();
  double bytes = 0;
  for (const at::Tensor& parameter : parameters) bytes += static_cast<double>(parameter.nbytes());
  const auto forward_first = [&] {
    net.zero_grad();
    const at::Tensor loss = net.loss();
    return seconds_of([&] { loss.backward(); });
  };
  const double backward =
      sample(forward_first, TimeitOptions().rounds(std::max(3, steps / 2)).warm_up(2)).median();
  std::printf("\n%s: %zu gradients, %.1f MiB; backward %.1f ms, one thread\n", work.name, parameters.size(),
              bytes / (1 << 20), backward * 1e3);
  std::printf("%8s %10s  %-28s %9s %9s %9s %8s\n", "share", "comm ms", "", "min ms", "median ms", "p99 ms",
              "hidden");
  for (const double share : shares) {
    const SlowLink::Cost cost{.latency = latency, .bytes_per_second = bytes / (share * backward)};
    const double communication = share * backward + std::chrono::duration<double>(latency).count();
    const comm::Group first = make_group(cost), second = make_group(cost), third = make_group(cost);
    const auto named = parallel::parameters_to_reduce(net.module());
    const comm::Group fourth = make_group(cost), fifth = make_group(cost);
    parallel::Reducer ours(first, named), after(second, named, {.overlap = false});
    parallel::Reducer scripted(fourth, named), scripted_after(fifth, named);
    const auto script_with = [&](std::int64_t chunk_bytes) {
      const auto fast = std::make_shared<decltype(script::script(loss_of))>(
          script::script(loss_of, script::ScriptOptions().gradient_chunk_bytes(chunk_bytes)));
      return [fast, &net] { return (*fast)(net.input(), net.target()); };
    };
    const auto fast = script_with(script::ScriptOptions().gradient_chunk_bytes());
    const auto theirs = make_c10d(parameters, third);
    const auto nothing = [] {};
    const Comparison figures =
        compare({way("no communication", net, nothing),
                 way(
                     "Reducer", net, [&] { ours.prepare(); }, [&] { ours.finish(); }),
                 way("c10d::Reducer", net, [&] { prepare(*theirs); }),
                 way(
                     "Reducer without overlap", net, [&] { after.prepare(); }, [&] { after.finish(); }),
                 way("script, no communication", net, nothing, nothing, fast),
                 way(
                     "script, Reducer", net, [&] { scripted.prepare(); }, [&] { scripted.finish(); }, fast),
                 way(
                     "script in one node, Reducer", net, [&] { scripted_after.prepare(); },
                     [&] { scripted_after.finish(); }, script_with(0))},
                options(steps));
    const double eager = figures.rows[0].measurement.median(),
                 replayed = figures.rows[4].measurement.median();
    for (std::size_t i = 0; i < figures.rows.size(); ++i) {
      const Measurement& measurement = figures.rows[i].measurement;
      const double compute = i < 4 ? eager : replayed;
      std::printf("%7.0f%% %10.1f  %-28s %9.1f %9.1f %9.1f %7.1f%%\n", share * 100, communication * 1e3,
                  measurement.label.c_str(), measurement.best() * 1e3, measurement.median() * 1e3,
                  measurement.percentile(0.99) * 1e3,
                  100 * (compute + communication - measurement.median()) / communication);
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "all";
  const int steps = argc > 2 ? std::atoi(argv[2]) : 10;
  const std::chrono::microseconds latency(argc > 3 ? std::atoi(argv[3]) : 100);
  const std::vector<double> shares =
      argc > 4 ? std::vector<double>{std::atof(argv[4]) / 100} : std::vector<double>{0.25, 0.5, 1.0};
  cohort::memory::tune_allocator();
  at::set_num_threads(1);
  for (const Workload& work :
       {Workload{"mlp", 256, 32}, Workload{"vgg16", 8, 64}, Workload{"resnet50", 4, 128}}) {
    if (which == "all" || which == work.name) measure(work, steps, latency, shares);
  }
}
