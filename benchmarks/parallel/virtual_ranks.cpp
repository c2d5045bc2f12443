// What virtual ranks cost where each process has one of them: a training step (forward, backward, SGD with
// momentum) of ResNet-18 with "ddp" and with virtual ranks, in turn in one run. Each process has one thread,
// and a core of its own if there are enough.
//
// Run: parallel_virtual_ranks [processes, 2] [rounds, 15] [steps in a round, 2] [batch, 32] [size, 64]
//                             [backend, auto]
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
#include "cohort/comm/text_collectives.h"
#include "cohort/launch/spawn.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace {

using namespace cohort;

struct StepSizes {
  int processes, rounds, steps, batch, size;
  std::string backend;
};

class ResNetStep {
 public:
  ResNetStep(const StepSizes& sizes, const comm::Group& group)
      : ddp_(parallel::make_gradient_sync("ddp", group)),
        virtual_(std::make_shared<parallel::VirtualRankSync>(
            group, parallel::VirtualRankOptions{.num_virtual_ranks = group.size()})) {
    at::manual_seed(1);
    models::ModelOptions options;
    options.name = "resnet18";
    options.num_classes = 10;
    net_ = models::ResNet(options);
    models::set_memory_format(*net_, at::MemoryFormat::ChannelsLast);
    optimizer_ = std::make_shared<optim::SGD>(net_->parameters(), optim::SGDOptions(1e-3).momentum(0.9));
    const parallel::TaskParts parts{.modules = {{"", net_.ptr()}}, .optimizers = {{"", optimizer_, nullptr}}};
    ddp_->begin(parts);
    virtual_->begin(parts);
    input_ = at::randn({sizes.batch, 3, sizes.size, sizes.size}).contiguous(at::MemoryFormat::ChannelsLast);
    target_ = at::arange(sizes.batch).remainder(10);
  }

  void run_ddp() {
    optimizer_->zero_grad();
    run(*ddp_);
  }
  void run_virtual() {
    virtual_->begin_step();
    virtual_->begin_share(virtual_->shares().first, input_.size(0));
    virtual_->end_shares();
    run(*virtual_);
  }

 private:
  void run(parallel::GradientSync& sync) {
    const auto samples = static_cast<double>(input_.size(0));
    const at::Tensor loss = at::cross_entropy_loss(net_->forward(input_), target_);
    sync.prepare(*optimizer_, samples, true);
    loss.backward();
    sync.average(*optimizer_, samples, true);
    optimizer_->step();
  }

  std::shared_ptr<parallel::GradientSync> ddp_;
  std::shared_ptr<parallel::VirtualRankSync> virtual_;
  models::ResNet net_{nullptr};
  std::shared_ptr<optim::SGD> optimizer_;
  at::Tensor input_, target_;
};

void measure(const StepSizes& sizes) {
  memory::tune_allocator();
  at::set_num_threads(1);
  const comm::Group group =
      comm::init_process_group({.backend = sizes.backend, .check_consistency = comm::ConsistencyCheck::kOff});
  const std::vector<int>& cores = base::CpuSet::of_process().ids();
  base::CpuSet({cores[static_cast<std::size_t>(group.rank()) % cores.size()]}).pin_current_thread();
  ResNetStep step(sizes, group);
  constexpr int kWarmUp = 20;  // steps until the buckets of ddp stay
  for (int i = 0; i < kWarmUp; ++i) step.run_ddp();
  for (int i = 0; i < 3; ++i) step.run_virtual();
  const auto sample = [&](const char* name, auto run) {
    return bench::Variant::sampled(name, [&group, &sizes, run] {
      group.barrier();
      return bench::seconds_of([&] {
               for (int i = 0; i < sizes.steps; ++i) run();
             }) /
             sizes.steps;
    });
  };
  const bench::Comparison figures = bench::compare(
      {sample("ddp", [&] { step.run_ddp(); }), sample("virtual ranks", [&] { step.run_virtual(); })},
      bench::CompareOptions().timeit(
          bench::TimeitOptions().rounds(sizes.rounds).calls(sizes.steps).warm_up(0)));
  if (group.rank() != 0) return;
  std::printf(
      "ResNet-18, %d processes of one thread over %s, %d images of %d x %d each, %d rounds of %d steps\n",
      sizes.processes, group.backend().c_str(), sizes.batch, sizes.size, sizes.size, sizes.rounds,
      sizes.steps);
  std::printf("%s", figures.text().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const StepSizes sizes{.processes = number(1, 2),
                        .rounds = number(2, 15),
                        .steps = number(3, 2),
                        .batch = number(4, 32),
                        .size = number(5, 64),
                        .backend = argc > 6 ? argv[6] : "auto"};
  launch::spawn([&](int) { measure(sizes); }, sizes.processes);
  return 0;
}
