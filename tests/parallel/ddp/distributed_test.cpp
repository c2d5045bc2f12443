#include "cohort/parallel/distributed.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>

#include "cohort/autograd/recompute.h"
#include "cohort/models/registry.h"
#include "cohort/parallel/convert_sync_batch_norm.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::make_stack;
using test::seeded;
using test::share_of;
using test::Stack;
using test::wave;

struct Pair {
  at::Tensor sum;
  std::vector<at::Tensor> parts;
  int calls = 0;
};
COHORT_NESTED(Pair, sum, parts, calls)

// Several arguments, a result of a user's own type, a norm with buffers, a part that can be left out.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    first = register_module("first", torch::nn::Linear(5, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    second = register_module("second", torch::nn::Linear(4, 3));
    to(at::kDouble);
  }
  Pair forward(const at::Tensor& x, double factor, bool with_second) {
    const at::Tensor y = norm->forward(first->forward(x) * factor);
    if (!with_second) return {y.sum(1), {y}, 1};
    const at::Tensor z = second->forward(y);
    return {z.sum(1), {y, z}, 2};
  }
  torch::nn::Linear first = nullptr, second = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Normed);

Normed make_normed(std::uint64_t seed) {
  return seeded(seed, [] { return Normed(); });
}

TEST(DistributedDataParallelTest, AnyArgumentsAndResults) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    DistributedOptions options;
    options.find_unused_parameters = true;
    DistributedDataParallel<Normed> model(make_normed(1), group, options);
    for (const bool with_second : {true, false, true}) {
      model->zero_grad();
      const Pair result = model.forward(wave(4) * (group.rank() + 1), 2.0, with_second);
      EXPECT_EQ(result.calls, with_second ? 2 : 1);
      result.parts.back().square().sum().backward();
      EXPECT_EQ(model->second->weight.grad().defined(), with_second);
      at::Tensor both = model->first->weight.grad().clone();
      group.broadcast(both, 0).wait();
      EXPECT_TRUE(at::equal(both, model->first->weight.grad()));
    }
  });
}

TEST(DistributedDataParallelTest, StartsAndContinuesWithTheValuesOfRank0) {
  for (const bool init_sync : {true, false}) {
    for (const bool broadcast : {true, false}) {
      test::run_ranks(3, "gloo", [&](comm::Group& group) {
        DistributedOptions options;
        options.init_sync = init_sync;
        options.broadcast_buffers = broadcast;
        options.ignored = {"second.weight"};
        const auto seed = static_cast<std::uint64_t>(group.rank() + 1);
        DistributedDataParallel<Normed> model(make_normed(seed), group, options);
        const Normed first = make_normed(1), own = make_normed(seed);
        EXPECT_TRUE(at::equal(model->first->weight, (init_sync ? first : own)->first->weight));
        EXPECT_TRUE(at::equal(model->second->weight, own->second->weight)) << "ignored";

        model->norm->running_mean.fill_(group.rank());
        const at::Tensor x = wave(4);
        {
          const at::NoGradGuard no_grad;  // not in training: nothing travels
          model.forward(x, 1.0, true);
        }
        model->norm->running_mean.fill_(group.rank());
        model->norm->options.momentum(0.0);
        model.forward(x, 1.0, true).sum.square().sum().backward();
        EXPECT_EQ(model->norm->running_mean[0].item<double>(), broadcast ? 0.0 : group.rank());
        const at::Tensor own_gradient = model->second->weight.grad();
        at::Tensor sum = own_gradient.clone();
        group.all_reduce(sum).wait();
        EXPECT_FALSE(at::allclose(sum / 3, own_gradient)) << "an ignored gradient is this rank's alone";
      });
    }
  }
}

TEST(DistributedDataParallelTest, AccumulatesUnderNoSyncAndWeighsRanksByTheirSamples) {
  Stack whole = make_stack();
  (whole->forward(wave(7)).square().mean() / 2).backward();
  (whole->forward(wave(7) * 2).square().mean() / 2).backward();
  test::run_ranks(3, "shm", [&](comm::Group& group) {
    DistributedDataParallel<Stack> model(make_stack(), group);
    const at::Tensor share = share_of(wave(7), group.rank(), 3);
    model.set_weight(static_cast<double>(share.size(0)));
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      {
        const auto silent = model.no_sync();
        (model.forward(share).square().mean() / 2).backward();
      }
      (model.forward(share * 2).square().mean() / 2).backward();
      EXPECT_TRUE(at::allclose(model->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));
    }
  });
}

TEST(DistributedDataParallelTest, ARankWithoutSamplesStillMakesTheStep) {
  Stack whole = make_stack();
  whole->forward(wave(3)).square().mean().backward();
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    DistributedDataParallel<Stack> model(make_stack(), group);
    model.set_weight(3.0);
    if (group.rank() == 0) {
      model.forward(wave(3)).square().mean().backward();
    } else {
      model.step_without_samples();
    }
    EXPECT_TRUE(at::allclose(model->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));
  });
}

// Rank 1 has samples for the second part of a step alone.
TEST(DistributedDataParallelTest, ARankWithoutSamplesMayAccumulateToo) {
  Stack whole = make_stack();
  ((whole->forward(wave(3)).square().mean() + whole->forward(wave(4) * 2).square().mean()) / 2).backward();
  (whole->forward(wave(4) * 3).square().mean() / 2).backward();
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    DistributedDataParallel<Stack> model(make_stack(), group);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model.forward(wave(1));  // no backward follows
      {
        const auto silent = model.no_sync();
        if (group.rank() == 0) {
          model.forward(wave(3)).square().mean().backward();
        } else {
          model.step_without_samples();
        }
      }
      model.forward(wave(4) * (group.rank() + 2)).square().mean().backward();
      EXPECT_TRUE(at::allclose(model->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));
    }
  });
}

// What `steps` of each rank make of a model, computed in one process: gradients summed over the ranks that
// still have samples, divided by all or by those.
Stack joined_by_hand(const std::vector<int>& steps, bool divide_by_all) {
  Stack net = make_stack();
  for (int step = 0; step < *std::ranges::max_element(steps); ++step) {
    net->zero_grad();
    at::Tensor loss = at::zeros({}, at::kDouble);
    int active = 0;
    for (std::size_t rank = 0; rank < steps.size(); ++rank) {
      if (step >= steps[rank]) continue;
      ++active;
      loss = loss + net->forward(wave(2) + static_cast<double>(rank) + step).square().mean();
    }
    (loss / (divide_by_all ? static_cast<double>(steps.size()) : active)).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.1);
  }
  return net;
}

TEST(DistributedDataParallelTest, RanksThatHaveEndedTakePartInTheOthersSteps) {
  const std::vector<int> steps = {2, 5, 3};
  for (const auto& [divide_by_all, trains] : {std::pair(true, true), {false, true}, {true, false}}) {
    const Stack expected = joined_by_hand(steps, divide_by_all);
    test::run_ranks(3, divide_by_all ? "shm" : "gloo", [&](comm::Group& group) {
      DistributedOptions options;
      options.gradient_as_bucket_view = divide_by_all;
      DistributedDataParallel<Stack> model(make_stack(), group, options);
      model->train(trains);
      const auto rank = static_cast<std::size_t>(group.rank());
      model.join(
          [&] {
            for (int step = 0; step < steps[rank]; ++step) {
              model->zero_grad();
              model.forward(wave(2) + group.rank() + step).square().mean().backward();
              const at::NoGradGuard no_grad;
              for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
            }
          },
          {.divide_by_initial_world_size = divide_by_all});
      const auto wanted = expected->named_parameters();
      for (const auto& entry : model->named_parameters()) {
        EXPECT_TRUE(at::allclose(entry.value(), wanted[entry.key()], 1e-12, 1e-14)) << entry.key();
      }
      model.forward(wave(2)).sum().backward();  // and continues as before
    });
  }
}

TEST(DistributedDataParallelTest, BuffersComeFromARankThatStillHasSamples) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    DistributedOptions options;
    options.find_unused_parameters = true;
    DistributedDataParallel<Normed> model(make_normed(1), group, options);
    model->norm->options.momentum(0.0);
    model.join([&] {
      for (int step = 0; step < (group.rank() == 0 ? 1 : 3); ++step) {
        model->norm->running_mean.fill_(10 * group.rank() + step);
        model.forward(wave(4), 1.0, true).sum.sum().backward();
      }
    });
    EXPECT_EQ(model->norm->running_mean[0].item<double>(), 12) << "of the last step of rank 1";
  });
}

// Rank 0 ends first, so the others had begun to take rank 1's buffers.
TEST(DistributedDataParallelTest, AnEndThatIsNotTheSameIsAnErrorWhereThatIsAsked) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    DistributedDataParallel<Normed> model(make_normed(1), group);
    model->norm->options.momentum(0.0);
    const auto step = [&](double mean) {
      model->norm->running_mean.fill_(mean + group.rank());
      model.forward(wave(4), 1.0, true).sum.sum().backward();
    };
    const auto run = [&] {
      model.join(
          [&] {
            for (int i = 0; i < 1 + group.rank(); ++i) step(10 * i);
          },
          {.throw_on_early_termination = true});
    };
    COHORT_EXPECT_THROW_WITH(run(), UsageError, "has no more samples");
    for (int i = 0; i < 2; ++i) {
      step(100 * i);
      EXPECT_EQ(model->norm->running_mean[0].item<double>(), 100 * i) << "of rank 0";
    }
  });
}

TEST(DistributedDataParallelTest, HoldersSequentialAndSharedPointers) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    DistributedDataParallel<torch::nn::Linear> linear(torch::nn::Linear(5, 2), group);
    linear.forward(wave(2, 5, at::kFloat)).sum().backward();
    EXPECT_TRUE(linear->weight.grad().defined());
    DistributedDataParallel<std::shared_ptr<test::StackImpl>> pointer(make_stack().ptr(), group);
    pointer(wave(2)).sum().backward();
    EXPECT_TRUE(pointer->layers[0]->weight.grad().defined());
    EXPECT_EQ(pointer.module()->named_parameters().keys()[0], "layer0.weight");
    COHORT_EXPECT_THROW_WITH(DistributedDataParallel<Stack>(make_stack(), comm::Group()), UsageError,
                             "this process is not in the group");
  });
}

// Recomputation goes back through a part within a backward of its own, and hands the gradients to this one.
TEST(DistributedDataParallelTest, RecomputedPartsAreReducedToo) {
  const auto run = [](Stack& net, const at::Tensor& x, bool twice) {
    at::Tensor y =
        autograd::recompute([&](const at::Tensor& in) { return net->layers[0]->forward(in).tanh(); }, x);
    y = autograd::recompute([&](const at::Tensor& in) { return net->layers[1]->forward(in).tanh(); }, y);
    if (twice)
      y = autograd::recompute([&](const at::Tensor& in) { return net->layers[1]->forward(in).tanh(); }, y);
    return y;
  };
  const std::vector<std::int64_t> widths = {5, 6, 6};
  for (const bool twice : {false, true}) {
    Stack whole = make_stack(1, widths);
    run(whole, wave(4), twice).square().mean().backward();
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      struct RecomputedImpl : torch::nn::Module {
        RecomputedImpl(Stack of, std::function<at::Tensor(Stack&, const at::Tensor&)> how)
            : net(register_module("net", std::move(of))), run(std::move(how)) {}
        at::Tensor forward(const at::Tensor& x) { return run(net, x); }
        Stack net;
        std::function<at::Tensor(Stack&, const at::Tensor&)> run;
      };
      const auto make = [&] {
        return std::make_shared<RecomputedImpl>(
            make_stack(1, widths), [&](Stack& net, const at::Tensor& x) { return run(net, x, twice); });
      };
      const at::Tensor share = share_of(wave(4), group.rank(), 2);
      DistributedOptions options;
      options.gradient_as_bucket_view = !twice;
      DistributedDataParallel<std::shared_ptr<RecomputedImpl>> model(make(), group, options);
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        model.forward(share).square().mean().backward();
        for (std::size_t i = 0; i < 2; ++i) {
          EXPECT_TRUE(
              at::allclose(model->net->layers[i]->weight.grad(), whole->layers[i]->weight.grad(), 1e-12, 0))
              << step << " " << i;
        }
      }
    });
  }
}

TEST(DistributedDataParallelTest, ResNet18WithSyncBatchNormEqualsOneProcessOnTheJoinedBatch) {
  const auto make = [] {
    return seeded(4, [] {
      auto model = models::make_model({.name = "resnet18", .num_classes = 6, .width = 0.25, .extra = {}});
      model.ptr()->to(at::kDouble);
      return model;
    });
  };
  const at::Tensor x = wave(8, 3 * 16 * 16).view({8, 3, 16, 16});
  const at::Tensor y = at::arange(8, at::kLong).remainder(6);
  const auto step = [](const std::vector<at::Tensor>& parameters) {
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : parameters) {
      parameter.sub_(parameter.grad(), 0.05);
      parameter.mutable_grad() = at::Tensor();
    }
  };
  auto whole = make();
  for (int i = 0; i < 3; ++i) {
    at::cross_entropy_loss(whole.forward<at::Tensor>(x), y).backward();
    step(whole.ptr()->parameters());
  }
  for (const bool as_view : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      auto net = make();
      convert_sync_batch_norm(*net.ptr(), group);
      struct AnyImpl : torch::nn::Module {
        explicit AnyImpl(torch::nn::AnyModule of) : net(std::move(of)) { register_module("net", net.ptr()); }
        at::Tensor forward(const at::Tensor& in) { return net.forward<at::Tensor>(in); }
        torch::nn::AnyModule net;
      };
      DistributedOptions options;
      options.gradient_as_bucket_view = as_view;
      DistributedDataParallel<std::shared_ptr<AnyImpl>> model(std::make_shared<AnyImpl>(net), group, options);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor out = model.forward(share_of(x, group.rank(), 2));
        at::cross_entropy_loss(out, share_of(y, group.rank(), 2)).backward();
        step(model->parameters());
      }
      const auto wanted = whole.ptr()->named_parameters();
      for (const auto& entry : net.ptr()->named_parameters()) {
        const at::Tensor& other = wanted[entry.key()];
        EXPECT_LE((entry.value() - other).norm().item<double>(), 1e-9 * other.norm().item<double>())
            << entry.key();
      }
    });
  }
}

TEST(DistributedDataParallelTest, AnotherModelOnOneRankIsNamed) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    COHORT_EXPECT_THROW_WITH(
        DistributedDataParallel<Stack>(make_stack(1, {5, group.rank() == 0 ? 7 : 6, 3}), group), UsageError,
        "the model is not the same on all ranks: rank 0 has 'parameter layer0.weight double[7, 5]'");
  });
}

}  // namespace
}  // namespace cohort::parallel
