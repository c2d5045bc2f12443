// Two trainers share an embedding table on a server. DistributedDataParallel averages the rest of the model.
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".
//
//   Run:      rpc_embedding_ddp [STEPS]      or: cohort run --nproc-per-node 3 -- rpc_embedding_ddp
//   Expect:   a line per 5 steps with a falling loss; then
//             "losses and parameters are those of one process, bit for bit"
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/comm/init.h"
#include "cohort/launch/spawn.h"
#include "cohort/optim/factory.h"
#include "cohort/parallel/distributed.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/remote_module.h"

namespace {

namespace comm = cohort::comm;
namespace nn = torch::nn;
namespace optim = cohort::optim;
namespace rpc = cohort::rpc;
constexpr std::int64_t kTokens = 60, kWidth = 16, kClasses = 8, kBatch = 8, kTrainers = 2;

struct TableImpl : nn::Module {
  TableImpl() {
    torch::manual_seed(1);
    const auto options = nn::EmbeddingBagOptions(kTokens, kWidth).mode(torch::kSum);
    bags = register_module("bags", nn::EmbeddingBag(options));
  }
  at::Tensor forward(const at::Tensor& tokens) { return bags(tokens); }
  nn::EmbeddingBag bags{nullptr};
};
std::shared_ptr<TableImpl> make_table() {
  return std::make_shared<TableImpl>();
}
nn::Linear make_head() {
  torch::manual_seed(2);
  return nn::Linear(kWidth, kClasses);
}
const optim::OptimizerOptions kOptimizer{.name = "sgd", .lr = 0.1};

// A trainer's loss: each bag of tokens names its class.
template <typename Table, typename Head>
at::Tensor loss_of(Table& table, Head& head, std::int64_t trainer, std::int64_t step) {
  const at::Tensor classes = at::remainder(at::arange(kBatch, at::kLong) + step + trainer, kClasses);
  const at::Tensor tokens =
      at::remainder(classes.unsqueeze(1) * 7 + at::arange(3, at::kLong) * 3 + trainer, kTokens);
  return at::cross_entropy_loss(head.forward(table.forward(tokens)), classes);
}

comm::Group trainers;                     // none on the server
using Outcome = std::vector<at::Tensor>;  // of a trainer: its losses, then the parameters of its head

Outcome train(const rpc::RRef<TableImpl>& reference, std::int64_t steps) {
  rpc::RemoteModule table(reference);
  cohort::parallel::DistributedDataParallel<nn::Linear> head(make_head(), trainers);
  const auto of_head = optim::make_optimizer(kOptimizer, {{.params = head->parameters()}});
  rpc::DistributedOptimizer of_table(table.parameters(), kOptimizer);
  at::Tensor losses = at::empty({steps}, at::kDouble);
  for (std::int64_t step = 0; step < steps; ++step) {
    rpc::dist_autograd::Context context;
    of_head->zero_grad();
    const at::Tensor loss = loss_of(table, head, trainers.rank(), step);
    rpc::dist_autograd::backward(context, {loss}, {.into_grad = true});  // averages the head's gradients
    of_head->step();
    // Without the turns the steps would be made in any order, and the last bits differ from run to run.
    for (std::int64_t turn = 0; turn < kTrainers; ++turn) {
      if (turn == trainers.rank()) of_table.step(context);
      trainers.barrier();
    }
    losses[step] = loss.item<double>();
  }
  return {losses, head->weight.detach(), head->bias.detach()};
}
COHORT_REMOTE(make_table);
COHORT_REMOTE_MODULE(TableImpl);
COHORT_REMOTE(train);

// Both trainers in this process. Returns trainer 0's outcome, then the table.
Outcome train_alone(std::int64_t steps) {
  TableImpl table;
  nn::Linear head = make_head();
  const auto of_table = optim::make_optimizer(kOptimizer, {{.params = table.parameters()}}),
             of_head = optim::make_optimizer(kOptimizer, {{.params = head->parameters()}});
  at::Tensor losses = at::empty({steps}, at::kDouble);
  for (std::int64_t step = 0; step < steps; ++step) {
    of_head->zero_grad();
    std::vector<at::Tensor> of_trainers;
    for (std::int64_t trainer = 0; trainer < kTrainers; ++trainer) {
      of_table->zero_grad();
      const at::Tensor loss = loss_of(table, *head, trainer, step);
      (loss / kTrainers).backward();
      of_trainers.push_back(table.bags->weight.grad() * kTrainers);
      if (trainer == 0) losses[step] = loss.item<double>();
    }
    of_head->step();
    for (const at::Tensor& gradient : of_trainers) {
      table.bags->weight.mutable_grad() = gradient;
      of_table->step();
    }
  }
  return {losses, head->weight.detach(), head->bias.detach(), table.bags->weight.detach()};
}

void serve(std::int64_t steps) {
  const auto table = rpc::remote_module<make_table>("server");
  std::vector<rpc::Future<Outcome>> outcomes;
  for (const rpc::WorkerInfo& trainer : rpc::workers("trainer/*")) {
    const auto whole_run = rpc::to(trainer.name).within(std::chrono::hours(1));
    outcomes.push_back(rpc::rpc_async<train>(whole_run, table.rref(), steps));
  }
  Outcome together = outcomes.at(0).get();
  outcomes.at(1).get();
  for (std::int64_t step = 4; step < steps; step += 5) {
    std::printf("step %ld  loss %.4f\n", long(step + 1), together[0][step].item<double>());
  }
  together.push_back(table.parameters().front().to_here());
  const Outcome alone = train_alone(steps);
  bool is_same = together.size() == alone.size();
  for (std::size_t i = 0; is_same && i < alone.size(); ++i) is_same = at::equal(together[i], alone[i]);
  std::printf("losses and parameters are %sthose of one process, bit for bit\n", is_same ? "" : "NOT ");
  TORCH_CHECK(is_same, "the numbers are not those of one process");
}

void work(std::int64_t steps) {
  const comm::Group all = comm::init_process_group({.backend = "gloo"});
  trainers = all.subgroup({0, 1});
  const bool is_server = all.rank() == kTrainers;
  rpc::init_rpc(is_server ? "server" : "trainer/" + std::to_string(all.rank()), {.agent = {}, .group = all});
  if (is_server) serve(steps);
  rpc::shutdown();
  trainers = {};
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::int64_t steps = count > 1 ? std::atol(arguments[1]) : 20;
    cohort::launch::spawn_unless_launched([steps](int) { work(steps); }, kTrainers + 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
