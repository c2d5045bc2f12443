// Several ranks: checkpoints, uneven input, accumulation, batch norm over all ranks.
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>

#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/launch/spawn.h"
#include "cohort/parallel/convert_sync_batch_norm.h"
#include "cohort/parallel/distributed.h"

using namespace cohort;

namespace {

using DDP = parallel::DistributedDataParallel<torch::nn::Linear>;

void demo_checkpoint(comm::Group group) {
  DDP ddp_model(torch::nn::Linear(10, 5), group);
  const auto path = std::filesystem::temp_directory_path() / "cohort_from_pytorch.safetensors";
  if (group.rank() == 0) {
    checkpoint::save_safetensors(path, checkpoint::module_state(*ddp_model.module()));
  }
  group.barrier();
  checkpoint::load_module_state(*ddp_model.module(), checkpoint::load_safetensors(path));
  torch::mse_loss(ddp_model.forward(torch::randn({20, 10})), torch::randn({20, 5})).backward();
  group.barrier();
  if (group.rank() == 0) std::filesystem::remove(path);
}

void uneven_inputs(comm::Group group) {
  DDP ddp_model(torch::nn::Linear(1, 1), group);
  torch::optim::SGD optimizer(ddp_model->parameters(), 0.1);
  const int num_inputs = 5 + group.rank();
  ddp_model.join([&] {
    for (int i = 0; i < num_inputs; ++i) {
      optimizer.zero_grad();
      ddp_model.forward(torch::ones({1, 1})).sum().backward();
      optimizer.step();
    }
  });
}

void accumulate(comm::Group group) {
  DDP ddp_model(torch::nn::Linear(10, 5), group);
  torch::optim::SGD optimizer(ddp_model->parameters(), 0.001);
  const at::Tensor input = torch::randn({20, 10}), target = torch::randn({20, 5});
  optimizer.zero_grad();
  {
    auto no_sync = ddp_model.no_sync();
    for (int part = 0; part < 3; ++part) {
      (torch::mse_loss(ddp_model.forward(input), target) / 4).backward();  // on this rank alone
    }
  }
  (torch::mse_loss(ddp_model.forward(input), target) / 4).backward();  // reduces the sum of all four
  optimizer.step();
}

void sync_batch_norm(comm::Group group) {
  torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
  parallel::convert_sync_batch_norm(*model, group);
  auto reducer = parallel::Reducer(group, parallel::parameters_to_reduce(*model));
  reducer.prepare();
  model->forward(torch::randn({2, 3, 8, 8})).square().sum().backward();
  reducer.finish();
}

void on_every_rank() {
  auto group = comm::init_process_group();
  torch::manual_seed(1 + group.rank());
  demo_checkpoint(group);
  uneven_inputs(group);
  accumulate(group);
  sync_batch_norm(group);
  if (group.rank() == 0) std::puts("checkpoint, join, no_sync, batch norm over all ranks: done");
}

}  // namespace

void run_ranks() {
  launch::spawn_unless_launched([](int) { on_every_rank(); }, 2);
}
