// The modes of one process with a GPU beside a core: they compute what one device does with the whole batch.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/autograd/anchor_node.h"
#include "cohort/bench/profile.h"
#include "cohort/bench/timeit.h"
#include "cohort/core/generator_states.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/device_mapped.h"
#include "cohort/parallel/distributed.h"
#include "cohort/pipeline/balance.h"
#include "gpu_test.h"
#include "tests/pipeline/nets.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;
using base::Placement;
using pipeline::Schedule;
using pipeline::Tensors;

class GpuModesTest : public test::GpuTest {};

TEST_F(GpuModesTest, EachGpuThatIsNamedHasOneGenerator) {
  const std::vector<at::Generator> found = core::generators_of_gpus({gpu, c10::kCPU, gpu});
  ASSERT_EQ(found.size(), 2);
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0].device(), gpu);
}

constexpr double kTolerance = 1e-5;  // cores and GPUs sum in different orders

// Compared on the CPU, wherever they are.
void expect_close(const Tensors& expected, const Tensors& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(expected[i].defined(), got[i].defined()) << i;
    if (!expected[i].defined()) continue;
    const at::Tensor a = expected[i].detach().cpu(), b = got[i].detach().cpu();
    EXPECT_TRUE(at::allclose(a, b, kTolerance, kTolerance))
        << i << ": " << (a - b).abs().max().item<double>();
  }
}

Tensors gradients_of(const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

// A linear layer that is wide enough for a copy of its output to take a while.
struct ToyImpl : nn::Module {
  ToyImpl(const char* first, const char* second)
      : net1(register_module("net1", nn::Linear(64, 4096)), Placement::parse(first)),
        net2(register_module("net2", nn::Linear(4096, 8)), Placement::parse(second)) {}
  at::Tensor forward(const at::Tensor& x) { return net2.forward(at::relu(net1.forward(x))); }
  parallel::DeviceMapped<nn::Linear> net1, net2;
};
TORCH_MODULE(Toy);

// Losses and parameters after some steps.
Tensors train_toy(const char* first, const char* second, const at::Tensor& x, const at::Tensor& y) {
  at::manual_seed(1);
  Toy toy(first, second);
  torch::optim::SGD optimizer(toy->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Tensors result;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = toy->forward(x), loss = at::mse_loss(output, y.to(output.device()));
    loss.backward();
    optimizer.step();
    result.push_back(loss.detach());
  }
  for (const at::Tensor& parameter : toy->parameters()) result.push_back(parameter);
  return result;
}

TEST_F(GpuModesTest, AModelInTwoPartsOnAGpuAndACore) {
  const at::Tensor x = at::randn({512, 64}), y = at::randn({512, 8});
  const Tensors expected = train_toy("cpu:0", "cpu:0", x, y);
  expect_close(expected, train_toy("cuda:0", "cpu:0", x, y));
  expect_close(expected, train_toy("cpu:0", "cuda:0", x, y));
  expect_close(expected, train_toy("cuda:0", "cuda:0", x.to(gpu), y));
}

TEST_F(GpuModesTest, APipelineOverAGpuAndACoreInEverySchedule) {
  const at::Tensor x = at::randn({10, 3, 16, 16}), y = at::randn({10, 5});
  auto net = pipeline::test::conv_net();
  const Tensors losses = {
      pipeline::test::plain_step([&](const at::Tensor& in) { return net->forward(in); }, x, y, {3, 3, 2, 2})};
  const Tensors expected = gradients_of(net->parameters());
  for (const std::string way : {"cuda:0,cpu:0", "cpu:0,cuda:0", "cuda:0"}) {
    const auto placements = base::parse_placements(way);
    for (const Schedule& schedule :
         {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kInterleaved, Schedule::kZeroBubble}) {
      SCOPED_TRACE(way + " " + to_string(schedule));
      const bool is_interleaved = schedule == Schedule::kInterleaved, is_alone = placements.size() == 1;
      if (is_interleaved && is_alone) continue;
      const auto pipelined_net = pipeline::test::conv_net();
      const std::vector<std::size_t> at = is_alone         ? std::vector<std::size_t>{}
                                          : is_interleaved ? std::vector<std::size_t>{3, 6, 9}
                                                           : std::vector<std::size_t>{6};
      pipeline::PipelineOptions options;
      options.placements = placements;
      options.num_micro_batches = 4;
      options.schedule = schedule;
      pipeline::Pipeline pipe(pipeline::test::cut(pipelined_net, at), options);
      const at::Tensor loss = pipe.step(x, y, pipeline::test::mse);
      expect_close(losses, {loss});
      expect_close(expected, gradients_of(pipelined_net->parameters()));
    }
  }
}

// A model of the CPU with gradients: its stages move their parameters, and the gradients follow.
TEST_F(GpuModesTest, TuningPutsGradientsBackBesideTheirParameters) {
  auto net = pipeline::test::mlp();
  for (const at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  pipeline::PipelineOptions options;
  options.placements = base::parse_placements("cuda:0,cpu:0");
  pipeline::tune(
      pipeline::test::cut(net, {3}), options, {at::randn({8, 10})}, {at::randn({8, 5})},
      [](const Tensors& out, const Tensors& target) { return at::mse_loss(out.at(0), target.at(0)); },
      {.split_sizes = {4}, .repeats = 1});
  EXPECT_TRUE(net->parameters().front().is_cuda());
  EXPECT_TRUE(net->parameters().back().is_cpu());
  for (const at::Tensor& parameter : net->parameters()) {
    ASSERT_EQ(parameter.grad().device(), parameter.device());
    EXPECT_TRUE(at::equal(parameter.grad(), at::ones_like(parameter)));
  }
}

// Their layers draw on the GPU, whose generator is seeded anew meanwhile.
TEST_F(GpuModesTest, TuningAndProfilingPutTheGeneratorsBack) {
  nn::Sequential net(nn::Linear(10, 10), nn::Dropout(0.5), nn::Linear(10, 5), nn::Dropout(0.5));
  const at::Tensor x = at::randn({8, 10}), y = at::randn({8, 5});
  pipeline::PipelineOptions options;
  options.placements = base::parse_placements("cuda:0,cpu:0");
  const auto tunes = [&] {
    pipeline::tune(
        pipeline::test::cut(net, {2}), options, {x}, {y},
        [](const Tensors& out, const Tensors& target) { return at::mse_loss(out.at(0), target.at(0)); },
        {.split_sizes = {4}, .repeats = 1});
  };
  const auto profiles = [&] {
    net->to(gpu);
    pipeline::profile_layers(net, x, {.placements = base::parse_placements("cuda:0"), .repeats = 1});
  };
  const auto drawn_after = [&](const std::function<void()>& call) {
    at::manual_seed(3);
    at::rand({4}, at::TensorOptions(gpu));  // from within the stream
    call();
    return Tensors{at::rand({4}), at::rand({4}, at::TensorOptions(gpu)).cpu()};
  };
  const Tensors expected = drawn_after([] {});
  pipeline::test::expect_same_bits(drawn_after(tunes), expected, "number after tune()");
  pipeline::test::expect_same_bits(drawn_after(profiles), expected, "number after profile_layers()");
}

TEST_F(GpuModesTest, DataParallelOverAGpuAndACore) {
  const at::Tensor x = at::randn({64, 10}), y = at::randn({64, 5});
  auto net = pipeline::test::mlp(512), twin = pipeline::test::mlp(512);
  at::mse_loss(twin->forward(x), y).backward();
  for (const char* placements : {"cpu:0,cuda:0", "cuda:0,cpu:0", "cuda:0"}) {
    SCOPED_TRACE(placements);
    const bool begins_on_gpu = std::string(placements).starts_with("cuda");
    net->to(begins_on_gpu ? gpu : at::Device(at::kCPU));
    net->zero_grad();
    parallel::DataParallel<nn::Sequential> model(net, {.device_ids = base::parse_placements(placements)});
    for (int step = 0; step < 2; ++step) {  // the second with replicas that are there
      net->zero_grad();
      const at::Tensor output = model.forward(x);
      EXPECT_EQ(output.is_cuda(), begins_on_gpu);
      at::mse_loss(output, y.to(output.device())).backward();
      expect_close(gradients_of(twin->parameters()), gradients_of(net->parameters()));
    }
  }
}

TEST_F(GpuModesTest, DistributedDataParallelOverNccl) {
  test::run_ranks(1, "nccl", [&](comm::Group& group) {
    at::Tensor sum = at::full({1 << 20}, 3.0F, at::TensorOptions(gpu));
    group.all_reduce(sum, comm::ReduceOp::SUM).wait();
    EXPECT_TRUE(at::equal(sum, at::full_like(sum, 3.0F)));
    auto net = pipeline::test::mlp(64), twin = pipeline::test::mlp(64);
    net->to(gpu);
    twin->to(gpu);
    const at::Tensor x = at::randn({16, 10}, gpu), y = at::randn({16, 5}, gpu);
    parallel::DistributedDataParallel<nn::Sequential> ddp(net, group);
    at::mse_loss(ddp.forward(x), y).backward();
    at::mse_loss(twin->forward(x), y).backward();
    pipeline::test::expect_same_bits(gradients_of(net->parameters()), gradients_of(twin->parameters()));
  });
}

TEST_F(GpuModesTest, BackendsOfTheCpuSayThatTheyCarryNoTensorsOfAGpu) {
  for (const char* backend : {"gloo", "shm"}) {
    test::run_ranks(1, backend, [&](comm::Group& group) {
      at::Tensor there = at::ones({4}, at::TensorOptions(gpu));
      COHORT_EXPECT_THROW_WITH(group.all_reduce(there), UsageError,
                               "carries no tensors on cuda:0. Try: backend nccl");
    });
  }
}

TEST_F(GpuModesTest, ProfilesHaveTheGpusTime) {
  const at::Tensor x = at::randn({2048, 2048}, gpu);
  const auto work = [&] { return x.matmul(x); };
  const bench::Profile profile = bench::profile([&] { work(); }, bench::ProfileOptions().warm_up(2).steps(3));
  double on_gpu = 0;
  for (const bench::OperatorRow& row : profile.operators())
    on_gpu += std::chrono::duration<double>(row.gpu).count();
  const double seconds = bench::timeit(work, bench::TimeitOptions().rounds(3)).best();
  EXPECT_GT(on_gpu, 0) << profile.table(10);
  EXPECT_NEAR(on_gpu / 3, seconds, 0.5 * seconds) << profile.table(10);
}

// What the GPU computes on a stream of LibTorch's pool is copied to the CPU's placement after it.
TEST_F(GpuModesTest, CopiesBetweenPlacementsAreOrderedOnTheCallersStream) {
  Toy toy("cuda:0", "cpu:0");
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  const torch::NoGradGuard no_grad;
  for (int round = 0; round < 10; ++round) {
    const at::Tensor x = torch::randn({256, 64}, gpu);
    const at::Tensor expected = toy->forward(x).cpu();
    cuda.synchronizeDevice(0);
    at::Tensor found;
    {
      const c10::StreamGuard guard(cuda.getStreamFromGlobalPool(gpu));
      at::Tensor busy = torch::randn({4096, 4096}, gpu);
      for (int i = 0; i < 10; ++i) busy = busy.mm(busy).tanh();
      found = toy->forward(x + 0 * busy.sum()).cpu();
    }
    cuda.synchronizeDevice(0);
    expect_close({expected}, {found});
  }
}

// Its micro-batches are computed on a stream of LibTorch's pool, and go from the GPU to the CPU.
TEST_F(GpuModesTest, APipelineIsOrderedOnTheCallersStream) {
  auto net = pipeline::test::mlp(512), twin = pipeline::test::mlp(512);
  pipeline::PipelineOptions options;
  options.placements = base::parse_placements("cuda:0,cpu:0");
  options.num_micro_batches = 2;
  pipeline::Pipeline pipe(pipeline::test::cut(net, {3}), options);
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  const auto eager = [&](const at::Tensor& in) { return twin->forward(in); };
  for (int round = 0; round < 5; ++round) {
    const at::Tensor x = at::randn({64, 10}), y = at::randn({64, 5}), there = x.to(gpu);
    pipeline::test::zero_grad(net->parameters());
    pipeline::test::zero_grad(twin->parameters());
    const at::Tensor expected = pipeline::test::plain_step(eager, x, y, {32, 32});
    cuda.synchronizeDevice(0);
    at::Tensor found;
    {
      const c10::StreamGuard guard(cuda.getStreamFromGlobalPool(gpu));
      at::Tensor busy = at::randn({4096, 4096}, at::TensorOptions(gpu));
      for (int i = 0; i < 10; ++i) busy = busy.mm(busy).tanh();
      found = pipe.step(there + 0 * busy.sum(), y, pipeline::test::mse).cpu();
    }
    cuda.synchronizeDevice(0);
    expect_close({expected}, {found});
    expect_close(gradients_of(twin->parameters()), gradients_of(net->parameters()));
  }
}

TEST_F(GpuModesTest, AHookOfABackwardOnAGpuKnowsItsThread) {
  at::Tensor x = at::ones({2}, at::TensorOptions(c10::Device(c10::kCUDA, 0))).requires_grad_(true);
  at::Tensor y = x * 2;
  bool is_gpus = false;
  y.register_hook([&](const at::Tensor& gradient) {
    is_gpus = autograd::is_device_autograd_thread();
    return gradient;
  });
  y.sum().backward();
  EXPECT_TRUE(is_gpus);
  EXPECT_FALSE(autograd::is_device_autograd_thread());
}

}  // namespace
}  // namespace cohort
