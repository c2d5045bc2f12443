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

#include "cohort/core/allocator.h"
#include "cohort/core/timeline.h"
#include "cohort/models/resnet.h"
#include "cohort/parallel/cut.h"

namespace {

namespace core = cohort::core;
namespace parallel = cohort::parallel;
using Clock = std::chrono::steady_clock;

struct Times {
  std::vector<double> ms;
  void add(Clock::time_point begin) {
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  double at(double share) {
    std::sort(ms.begin(), ms.end());
    return ms[std::min(ms.size() - 1, static_cast<std::size_t>(share * double(ms.size())))];
  }
};

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
  core::tune_allocator();
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
    workers.push_back(parallel::PlacementWorker::of(core::Placement::parse("cpu:" + std::to_string(i))));
  }
  const parallel::PartName names[] = {parallel::PartName("cpu:0"), parallel::PartName("cpu:1")};

  Times one, two, apart;
  core::Timeline::start();
  for (int round = -1; round < rounds; ++round) {
    auto begin = Clock::now();
    {
      const core::ScopedPin pin(workers.front()->placement().cpus);
      whole->forward(input).square().mean().backward();
    }
    if (round >= 0) one.add(begin);
    begin = Clock::now();
    std::vector<parallel::Part> parts;
    for (std::size_t i = 0; i < 2; ++i) {
      parts.push_back(
          {names[i], workers[i], {halves[i]}, [net = nets[i]](const parallel::Tensors& x) mutable {
             return parallel::Tensors{net->forward(x.front())};
           }});
    }
    const auto results = parallel::run_parts(std::move(parts));
    at::cat({results[0][0], results[1][0]}).square().mean().backward();
    if (round >= 0) two.add(begin);
    begin = Clock::now();
    std::vector<core::Pending<void>> pending;
    for (std::size_t i = 0; i < 2; ++i) {
      pending.push_back(workers[i]->submit("apart", [net = nets[i], half = halves[i]]() mutable {
        net->forward(half).square().mean().backward();
      }));
    }
    for (auto& each : pending) each.get(core::Deadline(std::chrono::minutes(10)));
    if (round >= 0) apart.add(begin);
  }
  core::Timeline::stop();
  if (argc > 4) core::Timeline::write(argv[4]);
  std::printf("ResNet-18, batch %d of %d x %d, forward + backward, ms, %d rounds\n", batch, size, size,
              rounds);
  std::printf("%-28s %9s %9s %9s\n", "", "min", "median", "p99");
  std::printf("%-28s %9.1f %9.1f %9.1f\n", "whole batch, one thread", one.at(0), one.at(0.5), one.at(0.99));
  std::printf("%-28s %9.1f %9.1f %9.1f\n", "halves, cpu:0 and cpu:1", two.at(0), two.at(0.5), two.at(0.99));
  std::printf("%-28s %9.1f %9.1f %9.1f\n", "halves, nothing in common", apart.at(0), apart.at(0.5),
              apart.at(0.99));
  std::printf("the bound, one thread to halves with nothing in common: %.2f, of the least %.2f\n",
              one.at(0.5) / apart.at(0.5), one.at(0) / apart.at(0));
  std::printf("ratio of the medians %.2f, of the least %.2f; both backwards at once %.0f %% of the time\n",
              one.at(0.5) / two.at(0.5), one.at(0) / two.at(0), 100 * overlap(core::Timeline::json()));
  return 0;
}
