// What a process of virtual ranks is planned to keep, against what it keeps.
#include "cohort/parallel/virtual_ranks/virtual_rank_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/optim/sgd.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

struct SmallNet : torch::nn::Module {
  SmallNet() {
    register_module("in", torch::nn::Linear(7, 33));
    register_module("norm", torch::nn::BatchNorm1d(33));
    register_module("out", torch::nn::Linear(33, 5))->to(at::kBFloat16);
    register_module("frozen", torch::nn::Linear(9, 9))->weight.set_requires_grad(false);
  }
};

void step(VirtualRankSync& sync, SmallNet& net, const optim::SGD& optimizer) {
  sync.begin_step();
  const ShareRange range = sync.shares();
  for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
    sync.begin_share(share, 2);
    for (at::Tensor& parameter : net.parameters()) {
      if (parameter.requires_grad()) parameter.mutable_grad() = at::ones_like(parameter);
    }
  }
  sync.end_shares();
  sync.average(optimizer, 2, true);
  // Half precision is copied out of the sums.
  for (at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
}

// Returns what the process of this thread keeps of `sync`.
std::int64_t kept_bytes(const memory::AllocationProfiler& profiler, VirtualRankSync& sync,
                        const std::shared_ptr<SmallNet>& net, const std::shared_ptr<optim::SGD>& optimizer) {
  const auto now = [&] { return profiler.made_by(std::this_thread::get_id()).now; };
  const std::int64_t before = now();
  sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
  for (int i = 0; i < 3; ++i) step(sync, *net, *optimizer);
  return now() - before;
}

TEST(VirtualRankMemoryTest, WhatIsPlannedIsWhatAProcessKeeps) {
  const memory::AllocationProfiler profiler;
  for (const std::int64_t v : {1, 2, 3, 5, 8}) {
    for (int processes = 1; processes <= std::min<std::int64_t>(v, 5); ++processes) {
      for (const std::int64_t bucket_bytes : {500, 1 << 20}) {
        const VirtualRankOptions options{.num_virtual_ranks = v, .bucket_bytes = bucket_bytes};
        const auto check = [&](comm::Group group) {
          const auto net = std::make_shared<SmallNet>();
          const auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
          VirtualRankSync sync(std::move(group), options);
          const std::int64_t kept = kept_bytes(profiler, sync, net, optimizer);
          const VirtualRankMemory planned =
              plan_virtual_ranks(net->parameters(), {{"", net}}, options, sync.process(), processes);
          EXPECT_EQ(planned.total(), kept)
              << v << " virtual ranks, process " << sync.process() << " of " << processes << ": "
              << planned.sums << " + " << planned.exchange << " + " << planned.buffers;
        };
        if (processes == 1) {
          check({});
        } else {
          test::run_ranks(processes, "gloo", [&](comm::Group& group) { check(group); });
        }
      }
    }
  }
}

TEST(VirtualRankMemoryTest, MoreProcessesThanVirtualRanksAreAnError) {
  COHORT_EXPECT_THROW_WITH(plan_virtual_ranks({}, {}, {.num_virtual_ranks = 2}, 0, 3), UsageError,
                           "memory of 3 processes and 2 virtual ranks, expected 1 to 2 processes");
}

}  // namespace
}  // namespace cohort::parallel
