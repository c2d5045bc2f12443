// ResNet-50 in two shards on two workers, trained by a third one. A batch is split into micro-batches, so that both
// shards work at the same time. After "Distributed pipeline parallelism using RPC", one of PyTorch's tutorials.
//
//   Run:      rpc_resnet50 [IMAGES [SIZE [STEPS]]]      or: cohort run --nproc-per-node 3 -- rpc_resnet50
//   Expect:   a line for "splits 1", "splits 2", "splits 4" and "splits 8" with the seconds of a step; each ends with
//             "parameters are those of one process, bit for bit"
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "cohort/comm/job.h"
#include "cohort/launch/spawn.h"
#include "cohort/models/layers.h"
#include "cohort/models/resnet.h"
#include "cohort/optim/factory.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/remote_module.h"

namespace {

namespace core = cohort::core;
namespace models = cohort::models;
namespace optim = cohort::optim;
namespace rpc = cohort::rpc;

constexpr std::int64_t kClasses = 1000;

// The layers of ResNet-50 before layer3, or those from there on.
struct ShardImpl : torch::nn::Module {
  explicit ShardImpl(bool is_first) {
    models::ModelOptions options;
    options.name = "resnet50";
    options.num_classes = kClasses;
    bool is_here = is_first;
    for (const auto& [name, layer] : models::layers_of(models::ResNet(options).ptr())) {
      if (name == "layer3.0") is_here = !is_first;
      if (is_here) layers.push_back(layer);
    }
    for (std::size_t i = 0; i < layers.size(); ++i) register_module(std::to_string(i), layers[i].ptr());
  }
  at::Tensor run(at::Tensor x) {
    for (const core::AnyLayer& layer : layers) x = layer.forward(x);
    return x;
  }
  // Micro-batches come at the same time, and batch norm counts each.
  at::Tensor forward(const rpc::RRef<at::Tensor>& input) {
    const at::Tensor x = input.to_here();
    const std::lock_guard lock(mutex);
    return run(x);
  }
  std::vector<core::AnyLayer> layers;
  std::mutex mutex;
};

std::shared_ptr<ShardImpl> make_shard(bool is_first) {
  torch::manual_seed(1);
  return std::make_shared<ShardImpl>(is_first);
}
COHORT_REMOTE(make_shard);
COHORT_REMOTE_MODULE(ShardImpl);

const optim::OptimizerOptions kOptimizer{.name = "sgd", .lr = 0.05};

struct Batch {
  at::Tensor images, labels;  // [N, 3, size, size]; [N, kClasses], of which one is 1
};
Batch make_batch(std::int64_t images, std::int64_t size, std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + step));
  return {at::randn({images, 3, size, size}),
          at::one_hot(at::randint(kClasses, {images}, at::kLong), kClasses).to(at::kFloat)};
}

// Trains in this process alone, and returns the parameters.
std::vector<at::Tensor> train_alone(std::int64_t splits, const std::vector<Batch>& batches) {
  const auto first = make_shard(true), second = make_shard(false);
  std::vector<at::Tensor> parameters = first->parameters();
  for (const at::Tensor& parameter : second->parameters()) parameters.push_back(parameter);
  const auto optimizer = optim::make_optimizer(kOptimizer, {{.params = parameters}});
  for (const Batch& batch : batches) {
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& images : batch.images.chunk(splits)) {
      outputs.push_back(second->run(first->run(images)));
    }
    optimizer->zero_grad();
    at::mse_loss(at::cat(outputs), batch.labels).backward();
    optimizer->step();
  }
  return parameters;
}

void train(std::int64_t splits, const std::vector<Batch>& batches) {
  const auto first = rpc::remote_module<make_shard>("shard/1", true);
  const auto second = rpc::remote_module<make_shard>("shard/2", false);
  std::vector<rpc::RRef<at::Tensor>> parameters = first.parameters();
  for (auto& parameter : second.parameters()) parameters.push_back(parameter);
  rpc::DistributedOptimizer optimizer(parameters, kOptimizer);

  const auto begin = std::chrono::steady_clock::now();
  for (const Batch& batch : batches) {
    rpc::dist_autograd::Context context;
    std::vector<rpc::Future<at::Tensor>> futures;
    for (const at::Tensor& images : batch.images.chunk(splits)) {
      // The first shard's result goes straight from it to the second shard.
      const auto hidden = first.rref().remote<&ShardImpl::forward>(rpc::make_rref(images));
      futures.push_back(second.forward_async(hidden));
    }
    std::vector<at::Tensor> outputs;
    for (auto& future : futures) outputs.push_back(future.get());
    rpc::dist_autograd::backward(context, {at::mse_loss(at::cat(outputs), batch.labels)});
    optimizer.step(context);
  }
  const double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  bool is_same = true;
  const auto alone = train_alone(splits, batches);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    is_same = is_same && at::equal(parameters[i].to_here(), alone.at(i));
  }
  std::printf("splits %ld  %.3f s a step; parameters are %sthose of one process, bit for bit\n", long(splits),
              time / static_cast<double>(batches.size()), is_same ? "" : "NOT ");
}

void work(std::int64_t images, std::int64_t size, std::int64_t steps) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::init_rpc(rank == 0 ? "trainer/0" : "shard/" + std::to_string(rank));
  if (rank == 0) {
    std::vector<Batch> batches;
    for (std::int64_t step = 0; step < steps; ++step) batches.push_back(make_batch(images, size, step));
    for (const std::int64_t splits : {1, 2, 4, 8}) train(splits, batches);
  }
  rpc::shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::int64_t images = count > 1 ? std::atol(arguments[1]) : 120;
    const std::int64_t size = count > 2 ? std::atol(arguments[2]) : 128;
    const std::int64_t steps = count > 3 ? std::atol(arguments[3]) : 3;
    cohort::launch::spawn_unless_launched([&](int) { work(images, size, steps); }, 3);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
