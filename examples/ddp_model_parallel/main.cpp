// DistributedDataParallel over ranks that each span two placements: the model of a rank is cut over two
// threads (or GPUs), and the ranks average its gradients.
//
//   Run:      ddp_model_parallel [RANKS] [STEPS]      or: cohort run --nproc-per-node 2 -- ddp_model_parallel
//   Expect:   a line per 10 steps with the loss over all ranks, falling; then
//             "2 ranks x 2 placements: the parameters of one process to within 1e-06"
//
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/launch/spawn.h"
#include "cohort/parallel/device_mapped.h"
#include "cohort/parallel/distributed.h"

namespace {

using cohort::base::Placement;

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl(const Placement& first, const Placement& second)
      : net1(register_module("net1", torch::nn::Linear(10, 10)), first),
        net2(register_module("net2", torch::nn::Linear(10, 5)), second) {}
  at::Tensor forward(const at::Tensor& x) { return net2.forward(torch::relu(net1.forward(x))); }

  cohort::parallel::DeviceMapped<torch::nn::Linear> net1, net2;
};
TORCH_MODULE(ToyModel);

// The batch of all ranks, the same on each.
struct Joined {
  explicit Joined(int ranks) {
    torch::manual_seed(2);
    input = torch::randn({20 * ranks, 10});
    target = torch::randn({20 * ranks, 5});
  }
  at::Tensor input, target;
};

// What one process computes with the whole batch on one device.
std::vector<at::Tensor> train_alone(int ranks, int steps) {
  torch::manual_seed(1);
  torch::nn::Linear net1(10, 10), net2(10, 5);
  torch::nn::Sequential plain(net1, torch::nn::ReLU(), net2);
  torch::optim::SGD optimizer(plain->parameters(), 0.05);
  const Joined batch(ranks);
  for (int step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(plain->forward(batch.input), batch.target).backward();
    optimizer.step();
  }
  return plain->parameters();
}

void train(int steps) {
  torch::set_num_threads(1);
  cohort::comm::Group group = cohort::comm::init_process_group();
  torch::manual_seed(1);
  // Threads of their own on whatever core this rank has; with GPUs, cuda:2r and cuda:2r+1.
  ToyModel model(Placement::parse("cpu:0/first"), Placement::parse("cpu:0/second"));
  cohort::parallel::DistributedDataParallel<ToyModel> ddp(model, group);
  torch::optim::SGD optimizer(ddp->parameters(), 0.05);
  const Joined batch(group.size());
  const at::Tensor input = batch.input.narrow(0, 20 * group.rank(), 20);  // this rank's alone
  const at::Tensor target = batch.target.narrow(0, 20 * group.rank(), 20);
  for (int step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(ddp.forward(input), target);
    loss.backward();  // both halves on their threads; when it returns, the mean over all ranks
    optimizer.step();
    if (step % 10 != 0) continue;
    at::Tensor mean = loss.detach().clone();
    group.all_reduce(mean, cohort::comm::ReduceOp::AVG).wait();
    if (group.rank() == 0) std::printf("step %d  loss %.5f\n", step, mean.item<double>());
  }

  const std::vector<at::Tensor> expected = train_alone(group.size(), steps);
  double difference = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor parameter = ddp->parameters()[i].detach().cpu();
    difference = std::max(difference, (parameter - expected[i]).abs().max().item<double>());
  }
  TORCH_CHECK(difference < 1e-6, "one process has other parameters: they differ by ", difference);
  cohort::comm::require_same(group, "the sum of the weights",
                             std::to_string(model->net1->weight.sum().item<double>()));
  if (group.rank() == 0) {
    std::printf("%d ranks x 2 placements: the parameters of one process to within 1e-06\n", group.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 50;
  try {
    cohort::launch::spawn_unless_launched([&](int) { train(steps); }, ranks);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
