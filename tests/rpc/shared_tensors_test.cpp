// Tensors that go by handle between workers of one host: what each side sees is what it would see of a copy.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>
#include <tuple>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using test::comes_true;
using test::Job;

constexpr std::int64_t kLongSize = 1 << 16;  // of floats: 256 KiB

at::Tensor give_back(at::Tensor x) {
  return x;
}
at::Tensor give_back_reference(const at::Tensor& x) {
  return x;
}
at::Tensor add_in_place(at::Tensor x) {
  return x.add_(1);
}
at::Tensor kept_by_handler;
at::Tensor keep_and_return(const at::Tensor& x) {
  kept_by_handler = x;
  return x;
}
at::Tensor return_kept() {
  return kept_by_handler;
}
at::Tensor return_memory_of_kept() {
  return at::from_blob(kept_by_handler.data_ptr(), kept_by_handler.sizes(), kept_by_handler.options());
}
at::Tensor scale_shared(const at::Tensor& x, const at::Tensor& y) {
  return x * y;
}
std::tuple<at::Tensor, std::vector<at::Tensor>> change_and_swap(at::Tensor x, std::vector<at::Tensor> rest) {
  for (at::Tensor& tensor : rest) {
    if (tensor.scalar_type() != at::kBool) tensor.add_(1);
  }
  return {rest.empty() ? x : rest[0], {x, x.clone()}};
}
COHORT_REMOTE(give_back);
COHORT_REMOTE(give_back_reference);
COHORT_REMOTE(add_in_place);
COHORT_REMOTE(keep_and_return);
COHORT_REMOTE(return_kept);
COHORT_REMOTE(return_memory_of_kept);
COHORT_REMOTE(scale_shared);
COHORT_REMOTE(change_and_swap);

// Another thread may hold the result of a call for a moment after get() has returned. Then the next call
// copies it.
template <auto function>
bool stays_in_its_memory(Job& job) {
  at::Tensor x = job[0].shared_empty({kLongSize}).fill_(3);
  return comes_true([&] {
    const void* const was = x.const_data_ptr();
    x = job[0].template rpc_sync<function>("w1", std::move(x));
    EXPECT_TRUE(x.eq(3).all().item<bool>());
    return x.const_data_ptr() == was;
  });
}

TEST(AgentSharedTensorsTest, AMovedTensorComesBackInItsMemory) {
  Job job(2);
  EXPECT_TRUE(stays_in_its_memory<give_back>(job));
  EXPECT_TRUE(stays_in_its_memory<give_back_reference>(job));
  EXPECT_GE(job[0].metrics().bytes_by_handle, 2 * 4 * kLongSize);
  EXPECT_GE(job[1].metrics().bytes_by_handle, 2 * 4 * kLongSize);
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().shared_bytes_in_use == 0; }));
  job.shutdown();
}

// Counts of tensors and storages do not see it.
TEST(AgentSharedTensorsTest, MemoryThatAProgramMadeATensorOfIsCopied) {
  Job job(2);
  job[0].rpc_sync<keep_and_return>("w1", job[0].shared_empty({kLongSize}).fill_(3));
  at::Tensor came = job[0].rpc_sync<return_memory_of_kept>("w1");
  came.fill_(4);
  EXPECT_TRUE(job[0].rpc_sync<return_kept>("w1").eq(3).all().item<bool>());
  kept_by_handler.reset();
  job.shutdown();
}

TEST(AgentSharedTensorsTest, WhatSomebodyHoldsIsCopied) {
  Job job(2);
  for (int i = 0; i < 20; ++i) {
    at::Tensor x = job[0].shared_empty({kLongSize}).fill_(i), moved = x;
    const at::Tensor came = job[0].rpc_sync<add_in_place>("w1", std::move(moved));
    EXPECT_TRUE(came.eq(i + 1).all().item<bool>());
    EXPECT_TRUE(x.eq(i).all().item<bool>()) << "this side holds the tensor";
    at::Tensor base = job[0].shared_empty({2, kLongSize}).fill_(i), view = base[1];
    base.reset();
    const at::Tensor other = view.slice(0, 0, 10);
    job[0].rpc_sync<add_in_place>("w1", std::move(view));
    EXPECT_TRUE(other.eq(i).all().item<bool>()) << "another view holds the memory";
    at::Tensor twice = job[0].shared_empty({kLongSize}).fill_(i);
    std::vector<at::Tensor> both{twice, twice};
    const auto [first, second] = job[0].rpc_sync<change_and_swap>("w1", std::move(twice), std::move(both));
    EXPECT_TRUE(first.eq(i + 1).all().item<bool>());
    EXPECT_TRUE(second.at(0).eq(i).all().item<bool>()) << "each argument is a copy of its own";
  }
  job.shutdown();
}

TEST(AgentSharedTensorsTest, WhatAHandlerKeepsIsNotItsCallers) {
  Job job(2);
  for (int i = 0; i < 20; ++i) {
    at::Tensor came = job[0].rpc_sync<keep_and_return>("w1", job[0].shared_empty({kLongSize}).fill_(i));
    came.fill_(-1);
    came = job[0].rpc_sync<return_kept>("w1");
    EXPECT_TRUE(came.eq(i).all().item<bool>());
    came.fill_(-1);
    EXPECT_TRUE(kept_by_handler.eq(i).all().item<bool>());
  }
  kept_by_handler.reset();
  job.shutdown();
}

TEST(AgentSharedTensorsTest, ATensorThatCameCanBeWrittenResizedAndSentOn) {
  Job job(3);
  for (int i = 0; i < 10; ++i) {
    at::Tensor x = job[0].rpc_sync<give_back>("w1", at::full({kLongSize}, i, at::kFloat));
    x.add_(1);
    x = job[0].rpc_sync<add_in_place>("w2", std::move(x));
    x = job[0].rpc_sync<add_in_place>("w1", std::move(x));
    x.resize_({3 * kLongSize});
    EXPECT_TRUE(x.slice(0, 0, kLongSize).eq(i + 3).all().item<bool>());
    x.fill_(7);
    x = job[0].rpc_sync<give_back>("w1", std::move(x));
    EXPECT_EQ(x.numel(), 3 * kLongSize);
    EXPECT_TRUE(x.eq(7).all().item<bool>());
  }
  job.shutdown();
}

TEST(AgentSharedTensorsTest, TensorsOutliveTheirAgents) {
  at::Tensor own, came;
  {
    Job job(2);
    own = job[0].shared_empty({kLongSize}).fill_(1);
    for (int i = 0; i < 3; ++i) came = job[0].rpc_sync<add_in_place>("w1", own);
    job.shutdown();
  }
  EXPECT_TRUE(came.eq(2).all().item<bool>());
  own.fill_(5);
  came.fill_(6);
  EXPECT_TRUE(own.eq(5).all().item<bool>());
}

// A leaf that is used twice, and a product of two calls.
std::vector<at::Tensor> gradients_through_calls(std::size_t shared_cache) {
  AgentOptions options;
  options.shared_cache = shared_cache;
  Job job(2, options);
  at::manual_seed(4);
  const at::Tensor x = at::randn({kLongSize}).requires_grad_(), y = at::randn({kLongSize}).requires_grad_();
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < 3; ++i) {
    dist_autograd::Context context(job[0]);
    const at::Tensor z = job[0].rpc_sync<scale_shared>("w1", x, y);
    dist_autograd::backward(context, {job[0].rpc_sync<scale_shared>("w1", z, x).sum()});
    for (const at::Tensor& leaf : {x, y}) {
      for (const auto& [of, gradient] : dist_autograd::get_gradients(context)) {
        if (of.is_same(leaf)) gradients.push_back(gradient);
      }
    }
  }
  job.shutdown();
  return gradients;
}

TEST(AgentSharedTensorsTest, GradientsHaveTheBitsOfThoseOfCopies) {
  const std::vector<at::Tensor> by_handle = gradients_through_calls(64 << 20),
                                copied = gradients_through_calls(0);
  ASSERT_EQ(by_handle.size(), 6U);
  ASSERT_EQ(copied.size(), 6U);
  for (std::size_t i = 0; i < copied.size(); ++i) EXPECT_TRUE(at::equal(by_handle[i], copied[i])) << i;
}

TEST(AgentSharedTensorsTest, SharedEmptyMakesDenseTensorsOfTheCpu) {
  Job job(2);
  const at::Tensor x = job[0].shared_empty({3, 4}, at::TensorOptions(at::kLong));
  EXPECT_EQ(x.sizes(), (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(x.scalar_type(), at::kLong);
  EXPECT_EQ(job[0].shared_empty({0, 5}).numel(), 0);
  EXPECT_TRUE(job[0].shared_empty({2}, at::TensorOptions().requires_grad(true)).requires_grad());
  COHORT_EXPECT_THROW_WITH(job[0].shared_empty({-1}), UsageError, "a tensor cannot have the sizes [-1]");
  COHORT_EXPECT_THROW_WITH(job[0].shared_empty({std::int64_t{1} << 62, 8}), UsageError,
                           "cannot have the sizes");
  COHORT_EXPECT_THROW_WITH(job[0].shared_empty({2}, at::TensorOptions(at::kMeta)), UsageError,
                           "[rpc.shared_empty] got a tensor on meta");
  COHORT_EXPECT_THROW_WITH(job[0].shared_empty({2}, at::TensorOptions().layout(at::kSparse)), UsageError,
                           "of layout Sparse");
  job.shutdown();
}

// Calls with tensors of all kinds, of which some are moved. Beside them, the same on clones.
class RandomTensors {
 public:
  RandomTensors(Job& job, unsigned seed) : job_(job), random_(seed) {}

  void call() {
    at::Tensor x = next();
    std::vector<at::Tensor> rest;
    for (std::size_t i = pick(3); i > 0; --i) rest.push_back(next());
    if (pick(6) == 0) rest.push_back(x);
    std::vector<at::Tensor> clones;
    for (const at::Tensor& tensor : rest) clones.push_back(tensor.clone());
    const auto [first, expected_copies] = change_and_swap(x.clone(), clones);
    std::vector<std::pair<at::Tensor, at::Tensor>> held;  // and what they were
    for (const at::Tensor& tensor : rest) {
      if (pick(3) == 0) held.emplace_back(tensor, tensor.clone());
    }
    const bool moves = pick(3) != 0;
    auto [came, came_others] = moves ? job_[0].rpc_sync<change_and_swap>("w1", std::move(x), std::move(rest))
                                     : job_[0].rpc_sync<change_and_swap>("w1", x, rest);
    EXPECT_TRUE(at::equal(came, first));
    ASSERT_EQ(came_others.size(), expected_copies.size());
    for (std::size_t i = 0; i < expected_copies.size(); ++i)
      EXPECT_TRUE(at::equal(came_others[i], expected_copies[i]));
    came.zero_();
    for (const auto& [tensor, was] : held) EXPECT_TRUE(at::equal(tensor, was)) << "the callee writes it";
    if (pick(2) == 0) kept_.push_back(came_others[pick(2)]);
    if (kept_.size() > 4) kept_.erase(kept_.begin());
  }

 private:
  std::size_t pick(std::size_t below) { return random_() % below; }
  at::Tensor next() {
    if (!kept_.empty() && pick(3) == 0) {  // what came before, moved or not
      at::Tensor tensor = kept_.back();
      if (pick(2) == 0) kept_.pop_back();
      return tensor;
    }
    constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kLong, at::kBool, at::kHalf};
    const at::ScalarType type = kTypes[pick(5)];
    const auto rows = static_cast<std::int64_t>(pick(400)), columns = static_cast<std::int64_t>(pick(200));
    at::Tensor tensor = pick(2) == 0 ? job_[0].shared_empty({rows, columns}, at::TensorOptions(type))
                                     : at::empty({rows, columns}, at::TensorOptions(type));
    tensor.fill_(static_cast<std::int64_t>(pick(100)));
    switch (pick(5)) {
      case 0:
        return tensor.t();
      case 1:
        return tensor.slice(0, rows / 3);
      case 2:
        return rows > 0 ? tensor.slice(0, 0, 1).expand({3, columns}) : tensor;
      default:
        return tensor;
    }
  }

  Job& job_;
  std::mt19937 random_;
  std::vector<at::Tensor> kept_;
};

TEST(AgentSharedTensorsTest, AThousandRandomCallsSeeWhatCopiesWouldShow) {
  AgentOptions options;
  options.shared_cache = 8 << 20;
  Job job(2, options);
  for (unsigned seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(base::concat("seed ", seed));
    RandomTensors tensors(job, seed);
    for (int i = 0; i < 100; ++i) tensors.call();
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(job[0].metrics().bytes_by_handle, 1'000'000U);
  EXPECT_GT(job[1].metrics().bytes_by_handle, 1'000'000U);
  job.shutdown();
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().shared_bytes_in_use == 0; }));
}

}  // namespace
}  // namespace cohort::rpc
