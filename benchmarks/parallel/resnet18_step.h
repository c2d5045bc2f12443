#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/bench/compare.h"
#include "cohort/comm/init.h"
#include "cohort/launch/spawn.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/gradient_sync.h"

/// What the benchmarks of virtual ranks share: a training step of ResNet-18 in several processes of this
/// host, each with one thread, and a core of its own if there are enough.
namespace cohort::bench {

struct StepSizes {
  int processes, rounds, steps, batch, size;
  std::string backend;
};

/// [processes, 2] [rounds, 15] [steps in a round, 2] [batch, 32] [size, 64] [backend, auto]
inline StepSizes read_step_sizes(int argc, char** argv) {
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  return {.processes = number(1, 2),
          .rounds = number(2, 15),
          .steps = number(3, 2),
          .batch = number(4, 32),
          .size = number(5, 64),
          .backend = argc > 6 ? argv[6] : "auto"};
}

/// Of this process, which has one thread and its core from here on.
inline comm::Group begin_process(const StepSizes& sizes) {
  memory::tune_allocator();
  at::set_num_threads(1);
  comm::Group group =
      comm::init_process_group({.backend = sizes.backend, .check_consistency = comm::ConsistencyCheck::kOff});
  const std::vector<int>& cores = base::CpuSet::of_process().ids();
  base::CpuSet({cores[static_cast<std::size_t>(group.rank()) % cores.size()]}).pin_current_thread();
  return group;
}

/// The model, SGD with momentum, and a batch.
class ResNet18 {
 public:
  explicit ResNet18(const StepSizes& sizes) {
    at::manual_seed(1);
    models::ModelOptions options;
    options.name = "resnet18";
    options.num_classes = 10;
    net_ = models::ResNet(options);
    models::set_memory_format(*net_, at::MemoryFormat::ChannelsLast);
    optimizer_ = std::make_shared<optim::SGD>(net_->parameters(), optim::SGDOptions(1e-3).momentum(0.9));
    input_ = at::randn({sizes.batch, 3, sizes.size, sizes.size}).contiguous(at::MemoryFormat::ChannelsLast);
    target_ = at::arange(sizes.batch).remainder(10);
  }
  parallel::TaskParts parts() const {
    return {.modules = {{"", net_.ptr()}}, .optimizers = {{"", optimizer_, nullptr}}};
  }
  optim::SGD& optimizer() const { return *optimizer_; }
  std::int64_t batch() const { return input_.size(0); }

  /// Forward, backward, average and step.
  void step(parallel::GradientSync& sync) {
    const auto samples = static_cast<double>(batch());
    const at::Tensor loss = at::cross_entropy_loss(net_->forward(input_), target_);
    sync.prepare(*optimizer_, samples, true);
    loss.backward();
    sync.average(*optimizer_, samples, true);
    optimizer_->step();
  }

 private:
  models::ResNet net_{nullptr};
  std::shared_ptr<optim::SGD> optimizer_;
  at::Tensor input_, target_;
};

/// Seconds of a call of `run`, over the steps of a round that all processes begin together.
template <typename Run>
bench::Variant sample_step(const char* name, const comm::Group& group, const StepSizes& sizes, Run run) {
  return bench::Variant::sampled(name, [&group, &sizes, run] {
    group.barrier();
    return bench::seconds_of([&] {
             for (int i = 0; i < sizes.steps; ++i) run();
           }) /
           sizes.steps;
  });
}

inline bench::CompareOptions compare_options(const StepSizes& sizes) {
  return bench::CompareOptions().timeit(
      bench::TimeitOptions().rounds(sizes.rounds).calls(sizes.steps).warm_up(0));
}

inline void print_sizes(const StepSizes& sizes, const comm::Group& group) {
  std::printf(
      "ResNet-18, %d processes of one thread over %s, %d images of %d x %d each, %d rounds of %d steps\n",
      sizes.processes, group.backend().c_str(), sizes.batch, sizes.size, sizes.size, sizes.rounds,
      sizes.steps);
}

}  // namespace cohort::bench
