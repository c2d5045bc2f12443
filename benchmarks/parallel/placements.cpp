// What two placements of one core give over one: forward and backward of ResNet-18, the whole batch on one
// thread, its halves on cpu:0 and cpu:1, and the bound: its halves on two threads whose backwards have
// nothing to do with one another, in turn. Says how much of the two backwards' time was at the same time,
// from the timeline, and writes that. Run: parallel_placements [batch, 32] [size, 64] [rounds, 7]
// [trace.json]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cohort/base/timeline.h"
#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/resnet.h"
#include "cohort/parallel/graph_boundary.h"

namespace {

namespace bench = cohort::bench;
namespace base = cohort::base;
namespace core = cohort::core;
namespace memory = cohort::memory;
namespace parallel = cohort::parallel;

// Of the time in which a backward ran, the share in which two did.
double overlap(const std::string& trace) {
  std::vector<std::pair<double, int>> marks;
  const auto parsed = nlohmann::json::parse(trace);
  for (const auto& event : parsed.at("traceEvents")) {
    const std::string name = event.at("name");
    if (!name.ends_with(" backward")) continue;
    const double begin = event.at("ts");
    marks.emplace_back(begin, 1);
    marks.emplace_back(begin + double(event.at("dur")), -1);
  }
  std::sort(marks.begin(), marks.end());
  double any = 0, both = 0, last = 0;
  int running = 0;
  for (const auto& [time, change] : marks) {
    if (running >= 1) any += time - last;
    if (running >= 2) both += time - last;
    running += change;
    last = time;
  }
  return any > 0 ? both / any : 0;
}

}  // namespace

int main(int argc, char** argv) {
  memory::tune_allocator();
  const auto argument = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const int batch = argument(1, 32), size = argument(2, 64), rounds = argument(3, 7);
  at::set_num_threads(1);
  cohort::models::ModelOptions options;
  options.name = "resnet18";
  options.num_classes = 10;
  cohort::models::ResNet whole(options);
  const auto input = at::randn({batch, 3, size, size});
  const auto halves = input.chunk(2);
  std::vector<cohort::models::ResNet> nets;
  std::vector<std::shared_ptr<parallel::PlacementWorker>> workers;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(std::dynamic_pointer_cast<cohort::models::ResNetImpl>(whole->clone()));
    workers.push_back(parallel::PlacementWorker::of(base::Placement::parse("cpu:" + std::to_string(i))));
  }
  const parallel::PartName names[] = {parallel::PartName("cpu:0"), parallel::PartName("cpu:1")};

  const auto one_thread = [&] {
    const base::ScopedPin pin(workers.front()->placement().cpus);
    whole->forward(input).square().mean().backward();
  };
  const auto two_placements = [&] {
    std::vector<parallel::DevicePart> parts;
    for (std::size_t i = 0; i < 2; ++i) {
      parts.push_back(
          {names[i], workers[i], {halves[i]}, [net = nets[i]](const parallel::Tensors& x) mutable {
             return parallel::Tensors{net->forward(x.front())};
           }});
    }
    const auto results = parallel::run_on_devices(std::move(parts));
    at::cat({results[0][0], results[1][0]}).square().mean().backward();
  };
  const auto nothing_in_common = [&] {
    std::vector<base::Future<void>> pending;
    for (std::size_t i = 0; i < 2; ++i) {
      pending.push_back(workers[i]->submit("half", [net = nets[i], half = halves[i]]() mutable {
        net->forward(half).square().mean().backward();
      }));
    }
    for (auto& each : pending) each.get(base::Deadline(std::chrono::minutes(10)));
  };
  base::Timeline::start();
  const auto figures =
      bench::compare({{"whole batch, one thread", one_thread},
                      {"halves, cpu:0 and cpu:1", two_placements},
                      {"halves, nothing in common", nothing_in_common}},
                     bench::CompareOptions().timeit(bench::TimeitOptions().calls(1).rounds(rounds)));
  base::Timeline::stop();
  if (argc > 4) base::Timeline::write(argv[4]);
  std::printf("ResNet-18, batch %d of %d x %d, forward + backward, %d rounds\n%s", batch, size, size, rounds,
              figures.text().c_str());
  const auto least = [&](std::size_t row) { return figures.rows[row].measurement.best(); };
  std::printf("by the least: %.2fx, and %.2fx with nothing in common, which is the bound\n",
              least(0) / least(1), least(0) / least(2));
  std::printf("both backwards at once %.0f %% of the time\n", 100 * overlap(base::Timeline::json()));
  return 0;
}
