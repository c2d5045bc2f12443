// What virtual ranks cost where each process has one of them: a training step (forward, backward, SGD with
// momentum) of ResNet-18 with "ddp" and with virtual ranks, in turn in one run. Each process has one thread,
// and a core of its own if there are enough.
//
// Run: parallel_virtual_ranks [processes, 2] [rounds, 15] [steps in a round, 2] [batch, 32] [size, 64]
//                             [backend, auto]
#include <cstdio>
#include <memory>

#include "benchmarks/parallel/resnet18_step.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::bench {
namespace {

class TwoSyncs {
 public:
  TwoSyncs(const StepSizes& sizes, const comm::Group& group)
      : ddp_(parallel::make_gradient_sync("ddp", group)),
        virtual_(group, parallel::VirtualRankOptions{.num_virtual_ranks = group.size()}),
        model_(sizes) {
    ddp_->begin(model_.parts());
    virtual_.begin(model_.parts());
  }
  void run_ddp() {
    model_.optimizer().zero_grad();
    model_.step(*ddp_);
  }
  void run_virtual() {
    virtual_.begin_step();
    virtual_.begin_share(virtual_.shares().first, model_.batch());
    virtual_.end_shares();
    model_.step(virtual_);
  }

 private:
  std::shared_ptr<parallel::GradientSync> ddp_;
  parallel::VirtualRankSync virtual_;
  ResNet18 model_;
};

void compare_syncs(const StepSizes& sizes) {
  const comm::Group group = begin_process(sizes);
  TwoSyncs syncs(sizes, group);
  constexpr int kWarmUp = 20;  // steps until the buckets of ddp stay
  for (int i = 0; i < kWarmUp; ++i) syncs.run_ddp();
  for (int i = 0; i < 3; ++i) syncs.run_virtual();
  const bench::Comparison figures =
      bench::compare({sample_step("ddp", group, sizes, [&] { syncs.run_ddp(); }),
                      sample_step("virtual ranks", group, sizes, [&] { syncs.run_virtual(); })},
                     compare_options(sizes));
  if (group.rank() != 0) return;
  print_sizes(sizes, group);
  std::printf("%s", figures.text().c_str());
}

}  // namespace
}  // namespace cohort::bench

int main(int argc, char** argv) {
  const auto sizes = cohort::bench::read_step_sizes(argc, argv);
  cohort::launch::spawn([&](int) { cohort::bench::compare_syncs(sizes); }, sizes.processes);
  return 0;
}
