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
  // Micro-batches come at the same time.
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

class Remote {
 public:
  void step(const Batch& batch, std::int64_t splits) {
    rpc::dist_autograd::Context context;
    std::vector<rpc::Future<at::Tensor>> futures;
    for (const at::Tensor& images : batch.images.chunk(splits)) {
      // The first shard's result goes straight from it to the second shard.
      const auto hidden = first_.rref().remote<&ShardImpl::forward>(rpc::make_rref(images));
      futures.push_back(second_.forward_async(hidden));
    }
    std::vector<at::Tensor> outputs;
    for (auto& future : futures) outputs.push_back(future.get());
    rpc::dist_autograd::backward(context, {at::mse_loss(at::cat(outputs), batch.labels)});
    optimizer_.step(context);
  }
  std::vector<rpc::RRef<at::Tensor>> parameters() const {
    std::vector<rpc::RRef<at::Tensor>> all = first_.parameters();
    for (auto& parameter : second_.parameters()) all.push_back(parameter);
    return all;
  }

 private:
  rpc::RemoteModule<ShardImpl> first_ = rpc::remote_module<make_shard>("shard/1", true),
                               second_ = rpc::remote_module<make_shard>("shard/2", false);
  rpc::DistributedOptimizer optimizer_{parameters(), kOptimizer};
};

void train(std::int64_t images, std::int64_t size, std::int64_t steps) {
  Remote remote;
  const std::vector<rpc::RRef<at::Tensor>> there = remote.parameters();
  const auto first = make_shard(true), second = make_shard(false);  // the same in this process alone
  std::vector<at::Tensor> here = first->parameters();
  for (const at::Tensor& parameter : second->parameters()) here.push_back(parameter);
  const auto optimizer = optim::make_optimizer(kOptimizer, {{.params = here}});
  for (const std::int64_t splits : {1, 2, 4, 8}) {
    double seconds = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      const Batch batch = make_batch(images, size, step);
      const auto begin = std::chrono::steady_clock::now();
      remote.step(batch, splits);
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      std::vector<at::Tensor> outputs;
      for (const at::Tensor& part : batch.images.chunk(splits)) {
        outputs.push_back(second->run(first->run(part)));
      }
      optimizer->zero_grad();
      at::mse_loss(at::cat(outputs), batch.labels).backward();
      optimizer->step();
    }
    bool is_same = true;
    for (std::size_t i = 0; i < here.size(); ++i) is_same = is_same && at::equal(there[i].to_here(), here[i]);
    std::printf("splits %ld  %.3f s a step; parameters are %sthose of one process, bit for bit\n",
                long(splits), seconds / static_cast<double>(steps), is_same ? "" : "NOT ");
  }
}

void work(std::int64_t images, std::int64_t size, std::int64_t steps) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::init_rpc(rank == 0 ? "trainer/0" : "shard/" + std::to_string(rank));
  if (rank == 0) train(images, size, steps);
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
