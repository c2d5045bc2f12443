// DataParallel on cpu:0 and cpu:1 against one thread with the whole batch and against one process with two
// threads, in turn: a training step (forward, backward) of a ResNet; and what of DataParallel's step goes to
// bringing replicas up to date, cutting and joining batches, and adding gradients.
// Run: parallel_data_parallel [model, resnet50] [batch, 32] [size, 128] [rounds, 5]
#include "cohort/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "cohort/base/timeline.h"
#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/resnet.h"

namespace {

namespace bench = cohort::bench;
namespace base = cohort::base;
namespace core = cohort::core;
namespace memory = cohort::memory;
namespace parallel = cohort::parallel;

struct Times {
  std::vector<double> seconds;
  // What `work` returns.
  template <typename Work>
  auto add(const Work& work) {
    std::optional<std::invoke_result_t<Work>> result;
    seconds.push_back(bench::seconds_of([&] { result.emplace(work()); }));
    return *std::move(result);
  }
  double median_ms() const { return 1e3 * bench::percentile(seconds, 0.5); }
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
  memory::tune_allocator();
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
  const auto placements = base::parse_placements("cpu:0,cpu:1");
  parallel::Replicas replicas = parallel::replicate(net, placements);
  const auto step = [&](const auto& forward) {
    net->zero_grad();
    forward().square().mean().backward();
  };
  const auto one_thread = [&] {
    const base::ScopedPin pin(placements.front().cpus);
    step([&] { return net->forward(x); });
  };
  const auto two_threads = [&] {
    at::set_num_threads(2);
    step([&] { return net->forward(x); });
    at::set_num_threads(1);
  };
  Times refresh, scatter, gather;
  const auto forward = [&] {
    refresh.add([&] { return replicas.refresh(2), 0; });
    auto inputs = scatter.add([&] { return parallel::scatter(std::tuple(x), placements); });
    const auto results = parallel::parallel_apply<cohort::models::ResNet>(replicas, std::move(inputs));
    return gather.add([&] { return parallel::gather(results, placements[0]); });
  };
  base::Timeline::start();
  const auto figures = bench::compare(
      {{"one thread", one_thread}, {"two threads", two_threads}, {"DataParallel", [&] { step(forward); }}},
      bench::CompareOptions().timeit(bench::TimeitOptions().calls(1).rounds(rounds)));
  base::Timeline::stop();
  std::printf("%s, batch %d of %d x %d, forward + backward, %d rounds\n%s", options.name.c_str(), batch, size,
              size, rounds, figures.text().c_str());
  const double sums = sum_of_gradients(base::Timeline::json(), refresh.seconds.size());
  const double overhead = sums + refresh.median_ms() + scatter.median_ms() + gather.median_ms();
  std::printf(
      "of that: replicas brought up to date %.2f ms, scatter %.2f, gather %.2f, sums of gradients %.2f: %.2f "
      "ms, "
      "%.2f %% of DataParallel's step\n",
      refresh.median_ms(), scatter.median_ms(), gather.median_ms(), sums, overhead,
      0.1 * overhead / figures.rows[2].measurement.median());
  return 0;
}
