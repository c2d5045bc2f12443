// DataParallel on cpu:0 and cpu:1 against one thread with the whole batch and against one process with two
// threads, in turn: a training step (forward, backward) of a ResNet; and what of DataParallel's step goes to
// bringing replicas up to date, cutting and joining batches, and adding gradients.
// Run: parallel_data_parallel [model, resnet50] [batch, 32] [size, 128] [rounds, 5]
#include "cohort/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cohort/core/allocator.h"
#include "cohort/core/timeline.h"
#include "cohort/models/resnet.h"

namespace {

namespace core = cohort::core;
namespace parallel = cohort::parallel;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

struct Times {
  const char* name;
  std::vector<double> ms = {};
  double at(double share) {
    std::sort(ms.begin(), ms.end());
    return ms[std::min(ms.size() - 1, static_cast<std::size_t>(share * double(ms.size())))];
  }
};

// How long gradients were added, in ms: what the slower worker took, in each step.
double sum_of_gradients(const std::string& trace, std::size_t steps) {
  double total = 0;
  const auto parsed = nlohmann::json::parse(trace);
  for (const auto& event : parsed.at("traceEvents")) {
    if (event.at("name") == "sum of gradients") total += double(event.at("dur")) / 1000;
  }
  return total / 2 / double(steps);
}

}  // namespace

int main(int argc, char** argv) {
  core::tune_allocator();
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  cohort::models::ModelOptions options;
  options.name = argc > 1 ? argv[1] : "resnet50";
  options.num_classes = 10;
  const int batch = number(2, 32), size = number(3, 128), rounds = number(4, 5);
  at::set_num_threads(1);
  cohort::models::ResNet net(options);
  const at::Tensor x = at::randn({batch, 3, size, size});
  const auto placements = core::parse_placements("cpu:0,cpu:1");
  parallel::Replicas replicas = parallel::replicate(net, placements);
  Times one{"one thread"}, two{"two threads"}, both{"DataParallel"};
  Times refresh{"  replicas up to date"}, scatter{"  scatter"}, gather{"  gather"};
  const auto step = [&](Times& times, bool count, const auto& forward) {
    net->zero_grad();
    const auto begin = Clock::now();
    forward().square().mean().backward();
    if (count) times.ms.push_back(ms_since(begin));
  };
  core::Timeline::start();
  for (int round = -1; round < rounds; ++round) {
    const bool count = round >= 0;
    if (round == 0) core::Timeline::start();
    {
      const core::ScopedPin pin(placements.front().cpus);
      step(one, count, [&] { return net->forward(x); });
    }
    at::set_num_threads(2);
    step(two, count, [&] { return net->forward(x); });
    at::set_num_threads(1);
    step(both, count, [&] {
      const auto timed = [&](Times& times, const auto& work) {
        const auto begin = Clock::now();
        auto result = work();
        if (count) times.ms.push_back(ms_since(begin));
        return result;
      };
      timed(refresh, [&] { return replicas.refresh(2), 0; });
      auto inputs = timed(scatter, [&] { return parallel::scatter(std::tuple(x), placements); });
      const auto results = parallel::parallel_apply<cohort::models::ResNet>(replicas, std::move(inputs));
      return timed(gather, [&] { return parallel::gather(results, placements[0]); });
    });
  }
  core::Timeline::stop();
  std::printf("%s, batch %d of %d x %d, forward + backward, ms, %d rounds\n%-24s %9s %9s %9s %7s\n",
              options.name.c_str(), batch, size, size, rounds, "", "min", "median", "p99", "ratio");
  const auto print = [](Times& times) {
    std::printf("%-24s %9.2f %9.2f %9.2f", times.name, times.at(0), times.at(0.5), times.at(0.99));
  };
  for (Times* times : {&one, &two, &both}) {
    print(*times);
    std::printf(" %7.2f\n", one.at(0.5) / times->at(0.5));
  }
  for (Times* times : {&refresh, &scatter, &gather}) {
    print(*times);
    std::printf("\n");
  }
  const double sums = sum_of_gradients(core::Timeline::json(), static_cast<std::size_t>(rounds));
  const double overhead = sums + refresh.at(0.5) + scatter.at(0.5) + gather.at(0.5);
  std::printf("%-24s %29.2f\noverhead %.2f ms, %.2f %% of DataParallel's step\n", "  sums of gradients", sums,
              overhead, 100 * overhead / both.at(0.5));
  return 0;
}
