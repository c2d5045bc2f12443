// DistributedDataParallel at its smallest: four ranks, one linear layer, each rank with samples of its own.
//
//   Run:      ddp_minimal [RANKS] [STEPS]        or: cohort run --nproc-per-node 4 -- ddp_minimal
//   Expect:   a line per 20 steps with the loss over all ranks, falling; then
//             "the parameters are the same on all ranks"
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/launch/spawn.h"
#include "cohort/parallel/distributed.h"

namespace {

void train(int steps) {
  cohort::comm::Group group = cohort::comm::init_process_group();
  torch::manual_seed(1 + group.rank());  // other values on each rank, until the wrapper makes them rank 0's
  cohort::parallel::DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(10, 10), group);
  torch::optim::SGD optimizer(model->parameters(), 1e-3);

  const at::Tensor input = torch::randn({20, 10});  // this rank's alone
  const at::Tensor target = torch::randn({20, 10});
  for (int step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(model.forward(input), target);
    loss.backward();  // when it returns, gradients are the mean over all ranks
    optimizer.step();
    if (step % 20 == 0) {
      at::Tensor mean = loss.detach().clone();
      group.all_reduce(mean, cohort::comm::ReduceOp::AVG).wait();
      if (group.rank() == 0) std::printf("step %d  loss %.5f\n", step, mean.item<double>());
    }
  }

  cohort::comm::require_same(group, "the sum of the weights",
                             std::to_string(model->weight.sum().item<double>()));
  if (group.rank() == 0) std::puts("the parameters are the same on all ranks");
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 100;
  try {
    cohort::launch::spawn_unless_launched([&](int) { train(steps); }, ranks);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
