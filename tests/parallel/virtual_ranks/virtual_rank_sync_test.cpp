// Steps of virtual ranks on ranks that are threads, with gradients that the test makes.
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "cohort/parallel/virtual_ranks/internal/reduction_tree.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

/// Parameters of several types and layouts, and a buffer that each virtual rank moves.
struct MixedNet : torch::nn::Module {
  MixedNet() {
    const auto add = [&](const char* name, const at::Tensor& tensor) {
      register_parameter(name, tensor, tensor.is_floating_point());
    };
    add("weight", at::zeros({5, 7}));
    add("filter", at::zeros({4, 3, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast));
    add("transposed", at::zeros({6, 5}).t());
    add("double", at::zeros({11}, at::kDouble));
    add("half", at::zeros({9}, at::kBFloat16));
    add("sometimes", at::zeros({3}));
    add("never", at::zeros({2}));
    mean = register_buffer("mean", at::zeros({3}));
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
  at::Tensor mean, count;
};

constexpr std::int64_t kLeaves = 5;

std::int64_t samples_of(std::int64_t step, std::int64_t share) {
  if (step == 1 && share >= 2) return 0;  // the last batch of an epoch is short
  return 3 + (share * 7 + step) % 4;
}

/// The gradient of a parameter on a virtual rank; undefined where it has none.
at::Tensor leaf_gradient(const std::string& name, const at::Tensor& parameter, std::int64_t step,
                         std::int64_t share) {
  if (name == "never" || (name == "sometimes" && share != 3)) return {};
  const auto seed = static_cast<double>(step * 31 + share * 7) + static_cast<double>(name.size());
  const at::Tensor wave = at::arange(parameter.numel(), at::kDouble).mul(0.7).add(seed).sin();
  // Of very different sizes, so that the order of additions shows.
  return wave.mul(std::pow(10.0, static_cast<double>(share % 3) * 2))
      .view(parameter.sizes())
      .to(parameter.scalar_type());
}

struct MixedStep {
  explicit MixedStep(VirtualRankSync& sync) : sync(sync) {
    optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
    sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
  }
  /// One step; `bad`: the virtual rank whose loss is not finite. `late`: average() alone tells of the step.
  AverageReport run(std::int64_t step, std::int64_t bad = -1, bool late = false) {
    sync.begin_step();
    const ShareRange range = sync.shares();
    std::int64_t last = range.first;
    for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
      if (samples_of(step, share) > 0) last = share;
    }
    bool finite = true;
    for (std::int64_t share = range.first; share <= last; ++share) {
      const std::int64_t samples = samples_of(step, share);
      sync.begin_share(share, samples);
      if (share == last) sync.end_shares();
      if (samples == 0 || !finite) continue;
      EXPECT_EQ(net->count.item<std::int64_t>(), step) << "each virtual rank begins with the same buffers";
      net->count += 1;
      net->mean.add_(static_cast<double>(share + 1));
      if (share == bad) {
        finite = false;
        if (!late) sync.prepare(*optimizer, static_cast<double>(samples), false);
        continue;
      }
      if (share == last && !late) sync.prepare(*optimizer, static_cast<double>(samples), true);
      for (auto& entry : net->named_parameters()) {
        EXPECT_FALSE(entry.value().grad().defined()) << entry.key();
        entry.value().mutable_grad() = leaf_gradient(entry.key(), entry.value(), step, share);
      }
    }
    return sync.average(*optimizer, static_cast<double>(samples_of(step, last)), finite);
  }

  VirtualRankSync& sync;
  std::shared_ptr<MixedNet> net = std::make_shared<MixedNet>();
  std::shared_ptr<optim::SGD> optimizer;
};

VirtualRankOptions five_virtual_ranks() {
  return {.num_virtual_ranks = kLeaves, .bucket_bytes = 200};
}

/// Runs body(sync) on each of `processes` threads; without a group where there is one.
void on_processes(int processes, const std::function<void(VirtualRankSync&)>& body) {
  if (processes == 1) {
    VirtualRankSync sync({}, five_virtual_ranks());
    return body(sync);
  }
  test::run_ranks(processes, "gloo", [&](comm::Group& group) {
    VirtualRankSync sync(group, five_virtual_ranks());
    body(sync);
  });
}

/// The sum over a node as the definition of the tree says, in the type in which it is computed.
at::Tensor sum_of(const std::string& name, const at::Tensor& parameter, std::int64_t step, LeafRange node) {
  const at::ScalarType type = parameter.scalar_type() == at::kBFloat16 ? at::kFloat : parameter.scalar_type();
  if (node.size() > 1) {
    const std::int64_t middle = split_of(node);
    return sum_of(name, parameter, step, {node.begin, middle}) +
           sum_of(name, parameter, step, {middle, node.end});
  }
  const at::Tensor gradient = leaf_gradient(name, parameter, step, node.begin);
  const std::int64_t samples = samples_of(step, node.begin);
  if (!gradient.defined() || samples == 0) return at::zeros(parameter.sizes(), type);
  return gradient.to(type) * static_cast<double>(samples);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

TEST(VirtualRankSyncTest, AnyNumberOfProcessesHasTheBitsOfTheTree) {
  for (int processes = 1; processes <= kLeaves; ++processes) {
    on_processes(processes, [&](VirtualRankSync& sync) {
      MixedStep steps(sync);
      for (std::int64_t step = 0; step < 3; ++step) {
        SCOPED_TRACE(testing::Message() << processes << " processes, step " << step);
        double total = 0;
        for (std::int64_t share = 0; share < kLeaves; ++share)
          total += static_cast<double>(samples_of(step, share));
        const AverageReport report = steps.run(step, -1, step == 2);
        EXPECT_TRUE(report.ok());
        EXPECT_EQ(report.weight, total);
        EXPECT_GT(report.bytes, 0);
        for (const auto& entry : steps.net->named_parameters()) {
          const at::Tensor& parameter = entry.value();
          const bool is_used = entry.key() != "never" && (entry.key() != "sometimes" || step != 1);
          ASSERT_EQ(parameter.grad().defined(), is_used) << entry.key();
          if (!is_used) continue;
          const at::Tensor expected =
              (sum_of(entry.key(), parameter, step, {0, kLeaves}) / total).to(parameter.scalar_type());
          EXPECT_TRUE(same_bytes(parameter.grad(), expected)) << entry.key();
        }
        EXPECT_EQ(steps.net->count.item<std::int64_t>(), step + 1);
        EXPECT_EQ(steps.net->mean[0].item<float>(), static_cast<float>(step + 1)) << "virtual rank 0's";
      }
    });
  }
}

TEST(VirtualRankSyncTest, AnotherOrderOfAdditionsWouldShow) {
  const MixedNet net;
  const at::Tensor& weight = net.named_parameters()["weight"];
  at::Tensor left_fold = at::zeros_like(weight);
  for (std::int64_t share = 0; share < kLeaves; ++share) {
    left_fold = left_fold + sum_of("weight", weight, 0, {share, share + 1});
  }
  EXPECT_FALSE(at::equal(left_fold, sum_of("weight", weight, 0, {0, kLeaves})));
}

TEST(VirtualRankSyncTest, OneThatIsNotFiniteLeavesEveryProcessAsItWas) {
  for (int processes = 1; processes <= kLeaves; ++processes) {
    for (const std::int64_t bad : {0, 3}) {
      on_processes(processes, [&](VirtualRankSync& sync) {
        MixedStep steps(sync);
        steps.run(0);
        const AverageReport report = steps.run(1, bad);  // step 1 has samples on 0 and 1 alone
        const bool is_bad = samples_of(1, bad) > 0;
        EXPECT_EQ(report.ok(), !is_bad);
        if (is_bad) {
          EXPECT_EQ(report.bad_virtual_rank, bad);
          EXPECT_EQ(report.bad_rank, 0);
          EXPECT_EQ(steps.net->count.item<std::int64_t>(), 1);
          EXPECT_EQ(steps.net->mean[0].item<float>(), 1);
        }
      });
    }
  }
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    VirtualRankSync sync(group, five_virtual_ranks());
    MixedStep steps(sync);
    const AverageReport report = steps.run(0, 3);
    EXPECT_EQ(report.bad_virtual_rank, 3);
    EXPECT_EQ(report.bad_rank, 1);
    EXPECT_EQ(report.bytes, 0);
    EXPECT_TRUE(steps.run(0).ok()) << "the step can be made again";
  });
}

TEST(VirtualRankSyncTest, ProcessesMayChangeBetweenTwoSteps) {
  std::mutex mutex;
  std::map<std::string, at::Tensor> expected;
  on_processes(1, [&](VirtualRankSync& sync) {
    MixedStep steps(sync);
    steps.run(0);
    for (const auto& entry : steps.net->named_parameters()) {
      if (entry.value().grad().defined()) expected[entry.key()] = entry.value().grad().clone();
    }
  });
  test::run_ranks(3, "gloo", [&](comm::Group& group) {
    VirtualRankSync sync({}, five_virtual_ranks());
    MixedStep steps(sync);
    const auto two = group.subgroup({0, 1});
    const auto expect_same = [&](const char* what) {
      const std::lock_guard lock(mutex);
      for (const auto& [name, gradient] : expected) {
        EXPECT_TRUE(same_bytes(steps.net->named_parameters()[name].grad(), gradient)) << name << ", " << what;
      }
      steps.net->count.zero_();
    };
    sync.set_exchange(make_slice_exchange(group));
    EXPECT_EQ(sync.shares().count, group.rank() == 0 ? 1 : 2);
    steps.run(0);
    expect_same("three processes");
    if (two) {
      sync.set_exchange(make_slice_exchange(two));
      steps.run(0);
      expect_same("two");
    }
    sync.set_exchange(nullptr);
    EXPECT_EQ(sync.shares().count, kLeaves);
    steps.run(0);
    expect_same("one");
    sync.begin_step();
    COHORT_EXPECT_THROW_WITH(sync.set_exchange(nullptr), UsageError, "processes change within a step");
  });
}

TEST(VirtualRankSyncTest, MistakesAreNamed) {
  VirtualRankSync sync({}, {.num_virtual_ranks = 2});
  COHORT_EXPECT_THROW_WITH(sync.begin_step(), UsageError, "a step begins before begin()");
  torch::nn::Linear a(2, 2), b(2, 2);
  const auto optimizer_of = [](torch::nn::Linear& net) {
    return std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
  };
  const auto first = optimizer_of(a), second = optimizer_of(b), stranger = optimizer_of(b);
  const auto backward = [](torch::nn::Linear& net) { net->forward(at::ones({3, 2})).sum().backward(); };
  sync.begin({.modules = {{"a", a.ptr()}, {"b", b.ptr()}},
              .optimizers = {{"a", first, nullptr}, {"b", second, nullptr}}});
  sync.begin_step();
  sync.begin_share(0, 3);
  COHORT_EXPECT_THROW_WITH(sync.average(*first, 3, true), UsageError,
                           "averaged before all 2 virtual ranks of this process were computed. Try: while "
                           "(batch.advance())");
  COHORT_EXPECT_THROW_WITH(sync.begin_share(0, 3), UsageError, "virtual rank 0 begins, expected 1 to 1");
  sync.begin_share(1, 4);
  sync.end_shares();
  COHORT_EXPECT_THROW_WITH(sync.average(*first, 5, true), UsageError,
                           "averaged for 5 samples, expected 4, those of the last virtual rank");
  COHORT_EXPECT_THROW_WITH(sync.average(*stranger, 4, true), UsageError, "that was not added to the task");
  backward(a);
  backward(b);
  EXPECT_TRUE(sync.average(*first, 7, true).ok()) << "all samples of the process";
  backward(b);
  COHORT_EXPECT_THROW_WITH(sync.average(*second, 4, true), UsageError,
                           "gradients came after the first average_gradients() of the step");

  COHORT_EXPECT_THROW_WITH(
      sync.begin({.modules = {}, .optimizers = {{"b", second, nullptr}, {"c", stranger, nullptr}}}),
      UsageError, "has two optimizers");
  COHORT_EXPECT_THROW_WITH(VirtualRankSync({}, {.num_virtual_ranks = 0}), UsageError, "expected at least 1");
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    COHORT_EXPECT_THROW_WITH(
        VirtualRankSync(group, {.num_virtual_ranks = 2}), UsageError,
        "there are 3 processes and 2 virtual ranks: a process would have none. Try: at most 2");
    VirtualRankSync own(group, {.num_virtual_ranks = 3});
    const SyncBatchNorm1d norm(torch::nn::BatchNormOptions(2), group);
    COHORT_EXPECT_THROW_WITH(own.begin({.modules = {{"", norm.ptr()}}, .optimizers = {}}), UsageError,
                             "computes statistics over processes");
  });
}

TEST(VirtualRankSyncTest, AParameterThatIsUnfrozenLaterIsNamed) {
  VirtualRankSync sync({}, five_virtual_ranks());
  torch::nn::Linear linear(2, 3);
  linear->weight.requires_grad_(false);
  const auto optimizer = std::make_shared<optim::SGD>(linear->parameters(), optim::SGDOptions(0.1));
  sync.begin({.modules = {{"", linear.ptr()}}, .optimizers = {{"", optimizer, nullptr}}});
  sync.begin_step();
  linear->weight.requires_grad_(true);
  COHORT_EXPECT_THROW_WITH(sync.begin_step(), UsageError,
                           "a parameter [3, 2] of an optimizer requires a gradient");
}

TEST(VirtualRankSyncTest, TwoOptimizersThatAverageAfterAllBackwardsHaveTheirGradients) {
  for (int processes = 1; processes <= 2; ++processes) {
    const auto body = [](VirtualRankSync& sync) {
      torch::nn::Linear a(2, 1), b(2, 1);
      const auto first = std::make_shared<optim::SGD>(a->parameters(), optim::SGDOptions(0.1));
      const auto second = std::make_shared<optim::SGD>(b->parameters(), optim::SGDOptions(0.1));
      sync.begin({.modules = {{"a", a.ptr()}, {"b", b.ptr()}},
                  .optimizers = {{"a", first, nullptr}, {"b", second, nullptr}}});
      sync.begin_step();
      const ShareRange range = sync.shares();
      for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
        sync.begin_share(share, 1);
        a->forward(at::full({1, 2}, static_cast<double>(share + 1))).sum().backward();
        b->forward(at::full({1, 2}, static_cast<double>(share + 5))).sum().backward();
      }
      sync.end_shares();
      EXPECT_TRUE(sync.average(*first, 1, true).ok());
      EXPECT_TRUE(sync.average(*second, 1, true).ok());
      EXPECT_EQ(a->weight.grad()[0][0].item<float>(), 1.5F);
      EXPECT_EQ(b->weight.grad()[0][0].item<float>(), 5.5F);
    };
    if (processes == 1) {
      VirtualRankSync sync({}, {.num_virtual_ranks = 2});
      body(sync);
    } else {
      test::run_ranks(2, "gloo", [&](comm::Group& group) {
        VirtualRankSync sync(group, {.num_virtual_ranks = 2});
        body(sync);
      });
    }
  }
}

/// Counts the slices that are sent.
class CountingExchange : public SliceExchange {
 public:
  explicit CountingExchange(comm::Group group) : inner_(make_slice_exchange(std::move(group))) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override {
    ++sent;
    return inner_->all_to_all(std::move(output), input, output_bytes, input_bytes);
  }
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override {
    return inner_->all_gather(std::move(output), input);
  }
  Transfer broadcast(at::Tensor bytes) override { return inner_->broadcast(std::move(bytes)); }

  int sent = 0;

 private:
  std::shared_ptr<SliceExchange> inner_;
};

/// What the last backward of a step is.
enum class Backward {
  kOne,
  kRecomputes,  ///< a layer is computed again in it
  kTwo,         ///< each gradient comes in two pieces
};

/// Three layers.
struct ChainNet {
  ChainNet() : first(6, 6), middle(6, 6), last(6, 3) {
    std::int64_t layer = 0;
    for (torch::nn::Linear* linear : {&first, &middle, &last}) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : (*linear)->parameters()) {
        parameter.copy_(at::arange(parameter.numel(), at::kFloat).add(++layer).sin().view(parameter.sizes()));
      }
    }
  }
  at::Tensor loss(const at::Tensor& input, Backward backward) {
    const at::Tensor x = first->forward(input);
    const at::Tensor y = backward == Backward::kRecomputes ? autograd::recompute(first, x) : x;
    return last->forward(middle->forward(y).tanh()).square().mean();
  }
  std::vector<at::Tensor> parameters() {
    std::vector<at::Tensor> all;
    for (torch::nn::Linear* linear : {&first, &middle, &last}) {
      for (const at::Tensor& parameter : (*linear)->parameters()) all.push_back(parameter);
    }
    return all;
  }
  torch::nn::Linear first, middle, last;
};

/// Returns the gradients of each of four steps. `early`: how many slices each step sent before its average.
std::vector<at::Tensor> chain_steps(VirtualRankSync& sync, CountingExchange* exchange, Backward backward,
                                    std::vector<int>& early) {
  ChainNet net;
  const auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions(0.1));
  sync.begin({.modules = {}, .optimizers = {{"", optimizer, nullptr}}});
  std::vector<at::Tensor> gradients;
  for (std::int64_t step = 0; step < 4; ++step) {
    const int sent_before = exchange == nullptr ? 0 : exchange->sent;
    sync.begin_step();
    const ShareRange range = sync.shares();
    for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
      sync.begin_share(share, 4);
      const bool is_last = share + 1 == range.first + range.count;
      if (is_last) sync.end_shares();
      const auto seed = static_cast<double>(100 * step + 17 * share);
      const at::Tensor loss = net.loss(at::arange(24, at::kFloat).add(seed).sin().view({4, 6}), backward);
      if (is_last) sync.prepare(*optimizer, 4, true);
      if (backward == Backward::kTwo) (loss * 0.25).backward({}, /*keep_graph=*/true);
      loss.backward();
    }
    early.push_back(exchange == nullptr ? 0 : exchange->sent - sent_before);
    EXPECT_TRUE(sync.average(*optimizer, 4, true).ok());
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : net.parameters()) flat.push_back(parameter.grad().flatten());
    gradients.push_back(at::cat(flat));
    optimizer->step();
  }
  return gradients;
}

TEST(VirtualRankSyncTest, GradientsThatTravelWhileBackwardRunsHaveTheSameBits) {
  for (const Backward backward : {Backward::kOne, Backward::kRecomputes, Backward::kTwo}) {
    std::vector<int> early;
    VirtualRankSync alone({}, five_virtual_ranks());
    const std::vector<at::Tensor> expected = chain_steps(alone, nullptr, backward, early);
    for (int processes = 2; processes <= 4; ++processes) {
      test::run_ranks(processes, "gloo", [&](comm::Group& group) {
        SCOPED_TRACE(testing::Message() << processes << " processes, backward " << int(backward));
        VirtualRankSync sync(group, five_virtual_ranks());
        const auto exchange = std::make_shared<CountingExchange>(group);
        sync.set_exchange(exchange);
        std::vector<int> sent_early;
        const std::vector<at::Tensor> found = chain_steps(sync, exchange.get(), backward, sent_early);
        for (std::size_t step = 0; step < expected.size(); ++step) {
          EXPECT_TRUE(same_bytes(found[step], expected[step])) << "step " << step;
          EXPECT_EQ(sent_early[step] > 0, step > 0 && backward != Backward::kTwo) << "the first one counts";
        }
      });
    }
  }
}

TEST(VirtualRankSyncTest, AGradientThatComesTwiceWhereItCameOnceIsNamed) {
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    VirtualRankSync sync(group, {.num_virtual_ranks = 2});
    ChainNet net;
    const auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions(0.1));
    sync.begin({.modules = {}, .optimizers = {{"", optimizer, nullptr}}});
    for (const bool twice : {false, true}) {
      sync.begin_step();
      sync.begin_share(group.rank(), 4);
      sync.end_shares();
      const at::Tensor loss = net.loss(at::ones({4, 6}), Backward::kOne);
      sync.prepare(*optimizer, 4, true);
      loss.backward({}, /*keep_graph=*/true);
      if (twice) {
        COHORT_EXPECT_THROW_WITH(loss.backward(), UsageError, "came twice");
        return;
      }
      EXPECT_TRUE(sync.average(*optimizer, 4, true).ok());
    }
  });
}

TEST(VirtualRankSyncTest, IdleShareIsThatOfTheSlots) {
  EXPECT_EQ(idle_share(8, 4), 0);
  EXPECT_EQ(idle_share(8, 1), 0);
  EXPECT_NEAR(idle_share(8, 3), 1.0 / 9, 1e-15);
}

}  // namespace
}  // namespace cohort::parallel
