// What ranks on one machine reach together in training: forward, backward, reduction and a step of SGD with
// momentum. In turn in one run: ranks that reduce nothing (independent processes), Reducer over shm and over
// Gloo, and c10d::Reducer with PyTorch's bucket sizes over both. Each rank has one thread, and a core of its
// own if there are enough.
//
// Run: parallel_throughput mlp|vgg16|resnet50 [ranks, 2] [rounds, 3] [steps in a round, 3] [images of a rank]
//                          [ways, shm,gloo,c10d-shm,c10d-gloo]
//
// images/s: the sum over ranks of the images of a round by the time that the rank took for it. Each way keeps
// buckets of its own: four ways of vgg16 take 3.5 GiB in each rank.
#include <ATen/Parallel.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "benchmarks/parallel/c10d_reducer.h"
#include "benchmarks/parallel/workloads.h"
#include "cohort/base/cpu.h"
#include "cohort/bench/compare.h"
#include "cohort/comm/init.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/launch/spawn.h"
#include "cohort/memory/allocator.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/reducer.h"

namespace {

namespace comm = cohort::comm;
namespace parallel = cohort::parallel;
using namespace cohort::bench;

struct Way {
  std::string name;
  std::function<void()> before_backward;
  std::function<void()> after_backward = [] {};
};

struct BenchmarkOptions {
  Workload work;
  int ranks, rounds, steps;
  std::string ways;
};

comm::Group group_beside(const comm::Group& world, const std::string& name, const std::string& backend) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("benchmark " + name, world.store());
  return comm::make_group(store, world.rank(), world.size(), backend, std::chrono::minutes(5), "127.0.0.1",
                          comm::ConsistencyCheck::kOff);
}

// All hang on the same parameters; only what is prepared reduces.
std::vector<Way> make_ways(const comm::Group& world, Net& net, const std::string& names) {
  std::vector<Way> ways{{"independent", [] {}}};
  for (const std::string backend : {"shm", "gloo"}) {
    if (("," + names + ",").find("," + backend + ",") == std::string::npos) continue;
    const auto reducer = std::make_shared<parallel::Reducer>(group_beside(world, backend, backend),
                                                             parallel::parameters_to_reduce(net.module()));
    ways.push_back(
        {"Reducer, " + backend, [reducer] { reducer->prepare(); }, [reducer] { reducer->finish(); }});
  }
  for (const std::string backend : {"shm", "gloo"}) {
    const std::string name = "c10d-" + backend;
    if (names.find(name) == std::string::npos) continue;
    const comm::Group group = group_beside(world, name, backend);
    const auto reducer = make_c10d(net.parameters(), group);
    ways.push_back({"c10d::Reducer, " + backend, [reducer, group] { prepare(*reducer); }});
  }
  return ways;
}

void train(const BenchmarkOptions& plan) {
  cohort::memory::tune_allocator();
  at::set_num_threads(1);
  const comm::Group world =
      comm::init_process_group({.backend = "gloo", .check_consistency = comm::ConsistencyCheck::kOff});
  const std::vector<int>& cores = cohort::base::CpuSet::of_process().ids();
  cohort::base::CpuSet({cores[static_cast<std::size_t>(world.rank()) % cores.size()]}).pin_current_thread();
  Net net(plan.work);
  cohort::optim::SGD optimizer(net.parameters(), cohort::optim::SGDOptions(1e-4).momentum(0.9));
  std::vector<Way> ways = make_ways(world, net, plan.ways);
  const auto run = [&](Way& way, int steps) {
    for (int step = 0; step < steps; ++step) {
      net.zero_grad();
      const at::Tensor loss = net.loss();
      way.before_backward();
      loss.backward();
      way.after_backward();
      optimizer.step();
    }
  };
  constexpr int kWarmUp = 20;  // steps until the buckets of Reducer stay
  for (Way& way : ways) run(way, way.name.starts_with("Reducer") ? kWarmUp : 2);
  std::vector<Variant> variants;
  for (Way& way : ways) {
    variants.push_back(Variant::sampled(way.name, [&] {
      world.barrier();
      const double own_seconds = seconds_of([&] { run(way, plan.steps); });
      double rate = 0;
      for (const std::int64_t us : comm::all_gather_number(world, std::llround(1e6 * own_seconds))) {
        rate += static_cast<double>(plan.steps * plan.work.batch) / (static_cast<double>(us) * 1e-6);
      }
      return 1 / rate;  // seconds per image
    }));
  }
  const Comparison figures = compare(
      variants, CompareOptions().timeit(TimeitOptions().rounds(plan.rounds).calls(plan.steps).warm_up(0)));
  if (world.rank() != 0) return;
  std::printf("%s, %d ranks of one thread, %ld images of %ld x %ld a rank, %d rounds of %d steps\n",
              plan.work.name, plan.ranks, plan.work.batch, plan.work.size, plan.work.size, plan.rounds,
              plan.steps);
  std::printf("%-20s %10s %10s %10s  %s\n", "images/s", "least", "median", "best", "to independent (median)");
  const double alone = figures.rows[0].measurement.median();
  for (const auto& row : figures.rows) {
    const Measurement& measurement = row.measurement;
    std::printf("%-20s %10.2f %10.2f %10.2f  %.3f\n", measurement.label.c_str(),
                1 / measurement.percentile(1), 1 / measurement.median(), 1 / measurement.best(),
                alone / measurement.median());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const std::string name = argc > 1 ? argv[1] : "vgg16";
  for (Workload work : {Workload{"mlp", 64, 32}, Workload{"vgg16", 32, 64}, Workload{"resnet50", 16, 128}}) {
    if (name != work.name) continue;
    work.batch = number(5, static_cast<int>(work.batch));
    const BenchmarkOptions plan{.work = work,
                                .ranks = number(2, 2),
                                .rounds = number(3, 3),
                                .steps = number(4, 3),
                                .ways = argc > 6 ? argv[6] : "shm,gloo,c10d-shm,c10d-gloo"};
    cohort::launch::spawn([&](int) { train(plan); }, plan.ranks);
    return 0;
  }
  std::fprintf(stderr, "no model %s: mlp, vgg16 or resnet50\n", name.c_str());
  return 2;
}
