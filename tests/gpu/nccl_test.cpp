// What NCCL does otherwise than the backends of the CPU.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>

#include "cohort/parallel/distributed.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "gpu_test.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;

class GpuNcclTest : public test::GpuTest {};

// Two ranks need a GPU each.
class TwoGpusNcclTest : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && torch::cuda::device_count() < 2)
      GTEST_SKIP() << "one GPU, and NCCL wants one for each rank";
  }

  // body(group, device of the rank)
  void run(const std::function<void(comm::Group&, at::Device)>& body) const {
    test::run_ranks(2, "nccl", [&](comm::Group& group) {
      const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(group.rank()));
      c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
      body(group, device);
    });
  }
};

TEST_F(GpuNcclTest, WaitOrdersTheStreamAndDoesNotBlockTheHost) {
  test::run_ranks(1, "nccl", [&](comm::Group& group) {
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    at::Tensor sum = at::full({1 << 20}, 3.0F, at::TensorOptions(gpu));
    group.all_reduce(sum).wait();  // connects
    at::Tensor busy = at::rand({4096, 4096}, at::TensorOptions(gpu));
    busy = busy.mm(busy).tanh();  // loads the kernels
    cuda.synchronizeDevice(0);
    const auto start = Clock::now();
    for (int i = 0; i < 100; ++i) busy = busy.mm(busy).tanh();
    sum.mul_(busy.sum().isfinite());  // after the work
    group.all_reduce(sum).wait();
    const at::Tensor doubled = sum * 2;
    const auto until_waited = Clock::now() - start;
    cuda.synchronizeDevice(0);
    const auto until_done = Clock::now() - start;
    EXPECT_LT(until_waited, until_done / 4);
    EXPECT_TRUE(at::equal(doubled, at::full_like(doubled, 6.0F)));
  });
}

// NCCL registers memory with a communicator, which the first collective makes.
TEST_F(GpuNcclTest, MemoryOfAGroupCanBeHadBeforeItsFirstCollective) {
  test::run_ranks(1, "nccl", [&](comm::Group& group) {
    at::Tensor on_cpu = at::ones({3});
    group.all_reduce(on_cpu).wait();  // over Gloo: connects nothing of NCCL's
    at::Tensor early = group.empty({1 << 18}, at::TensorOptions(gpu)).fill_(2);
    group.all_reduce(early).wait();
    at::Tensor late = group.empty({1 << 18}, at::TensorOptions(gpu)).fill_(5);
    group.all_reduce(late).wait();
    EXPECT_TRUE(at::equal(early + late, at::full_like(early, 7)));
  });
}

TEST_F(TwoGpusNcclTest, MessagesWithTagsAreRejected) {
  run([](comm::Group& group, at::Device device) {
    at::Tensor number = at::full({4}, group.rank(), at::TensorOptions(device));
    if (group.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(group.send(number, 1, 7), UsageError, "NCCL has no tags");
      group.send(number, 1).wait();
    } else {
      COHORT_EXPECT_THROW_WITH(group.recv(number, 0, 7), UsageError, "NCCL has no tags");
      group.recv(number, 0).wait();
      EXPECT_EQ(number.sum().item<int>(), 0);
    }
  });
}

// What would be measured is the link of the CPU, and when kernels are queued.
TEST_F(TwoGpusNcclTest, BucketsKeepTheOrderOfArrivalAndAreNotPlannedByMeasurements) {
  run([](comm::Group& group, at::Device device) {
    at::manual_seed(1);
    nn::Sequential net;
    for (int i = 0; i < 6; ++i) net->push_back(nn::Linear(256, 256));
    net->to(device);
    parallel::DistributedOptions options;
    options.first_bucket_bytes = 1 << 16;
    options.plan = parallel::BucketPlan::kMeasured;
    parallel::DistributedDataParallel<nn::Sequential> ddp(net, group, options);
    std::vector<std::vector<std::string>> by_arrival;
    for (int step = 0; step < 30; ++step) {
      ddp.forward(at::rand({8, 256}, at::TensorOptions(device))).sum().backward();
      if (step == 3) by_arrival = ddp.reducer().buckets();
    }
    EXPECT_EQ(ddp.reducer().buckets(), by_arrival);
  });
}

TEST_F(TwoGpusNcclTest, SyncBatchNormComparesTheRanksChannels) {
  run([](comm::Group& group, at::Device device) {
    const std::int64_t channels = 4 + group.rank();
    parallel::SyncBatchNorm2d norm(channels, group);
    norm->to(device);
    COHORT_EXPECT_THROW_WITH(norm->forward(at::rand({2, channels, 3, 3}, at::TensorOptions(device))),
                             UsageError, "SyncBatchNorm");
  });
}

}  // namespace
}  // namespace cohort
