// What one rank does alone: a forward that no backward follows, evaluation, a step without samples.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "cohort/parallel/distributed.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

using test::make_stack;
using test::seeded;
using test::share_of;
using test::Stack;
using test::wave;

struct OptionalSecondImpl : torch::nn::Module {
  OptionalSecondImpl() {
    first = register_module("first", torch::nn::Linear(5, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    second = register_module("second", torch::nn::Linear(4, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool with_second = true) {
    const at::Tensor y = norm->forward(first->forward(x)).tanh();
    return with_second ? second->forward(y) : y;
  }
  torch::nn::Linear first = nullptr, second = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(OptionalSecond);

OptionalSecond make_optional_second() {
  return seeded(1, [] { return OptionalSecond(); });
}

void expect_buffers(const torch::nn::Module& module, const torch::nn::Module& want) {
  const auto wanted = want.named_buffers();
  for (const auto& entry : module.named_buffers()) {
    EXPECT_TRUE(at::allclose(entry.value(), wanted[entry.key()], 1e-12, 0)) << entry.key();
  }
}

// On rank 0 alone, however it weighs and whatever buffers it has: nothing travels, so nobody is waited for.
TEST(DistributedAloneTest, AForwardTravelsNowhereAndChangesNoGradient) {
  for (const std::string graph : {"whole", "with unused parameters", "static"}) {
    SCOPED_TRACE(graph);
    const bool finds_unused = graph == "with unused parameters";
    test::run_ranks(3, "shm", [&](comm::Group& group) {
      DistributedOptions options;
      options.find_unused_parameters = finds_unused;
      options.static_graph = graph == "static";
      DistributedDataParallel<OptionalSecond> model(make_optional_second(), group, options);
      const at::Tensor share = share_of(wave(9), group.rank(), 3);
      for (int step = 0; step < 25; ++step) {  // through both groupings of the buckets
        model.set_weight(step % 2 == 0 ? std::optional<double>(3) : std::nullopt);
        model->zero_grad();
        model.forward(share, !finds_unused || step % 3 == 0).square().mean().backward();
        std::vector<at::Tensor> gradients;
        for (const at::Tensor& parameter : model->parameters()) {
          gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
        }
        if (group.rank() == 0) {
          model.forward(share, false);  // a metric, or a batch that is skipped
          model->eval();
          model.forward(share, false);
          model->train();
          const at::NoGradGuard no_grad;
          model.forward(share, false);
        }
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          const at::Tensor now = model->parameters()[i].grad();
          ASSERT_EQ(now.defined(), gradients[i].defined());
          if (!now.defined()) continue;
          ASSERT_TRUE(at::equal(now, gradients[i])) << graph << ", " << step << ", parameter " << i;
        }
      }
    });
  }
}

// Skipped batches between accumulation and the step that reduces: once the mean, and not a fraction of it.
TEST(DistributedAloneTest, BatchesThatAreSkippedScaleNothing) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    DistributedOptions options;
    options.find_unused_parameters = true;
    DistributedDataParallel<OptionalSecond> model(make_optional_second(), group, options);
    {
      const auto silent = model.no_sync();
      model.forward(wave(4)).sum().backward();
    }
    const at::Tensor accumulated = model->second->bias.grad().clone();
    for (int skipped = 0; skipped < 3; ++skipped) model.forward(wave(4), false);
    EXPECT_TRUE(at::equal(model->second->bias.grad(), accumulated));
    model.forward(wave(4), false).sum().backward();
    EXPECT_TRUE(at::allclose(model->second->bias.grad(), accumulated, 1e-12, 0));
  });
}

TEST(DistributedAloneTest, EvaluationHasTheBuffersOfRank0OnEveryRank) {
  test::run_ranks(3, "shm", [](comm::Group& group) {
    DistributedDataParallel<OptionalSecond> model(make_optional_second(), group);
    OptionalSecond first = make_optional_second();  // what rank 0 has
    for (int step = 0; step < 3; ++step) {
      model.forward(wave(6) * (group.rank() + 1) + step).square().mean().backward();
      first->forward(wave(6) + step);
    }
    expect_buffers(*model.module(), *first);
    model->eval();
    first->eval();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(model.forward(wave(5)), first->forward(wave(5)), 1e-12, 0));
  });
}

// After forwards that nothing was reduced after, each rank has buffers of its own, until they are asked for.
TEST(DistributedAloneTest, BuffersOfForwardsThatDoNotReduceAreSynchronizedOnDemand) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    DistributedOptions options;
    options.ignored = {"norm.running_var"};
    DistributedDataParallel<OptionalSecond> model(make_optional_second(), group, options);
    OptionalSecond first = make_optional_second(), own = make_optional_second();
    {
      const auto silent = model.no_sync();
      model.forward(wave(6) * (group.rank() + 1)).square().mean().backward();
    }
    first->forward(wave(6));
    own->forward(wave(6) * (group.rank() + 1));
    expect_buffers(*model.module(), *own);
    model.synchronize_buffers();
    EXPECT_TRUE(at::allclose(model->norm->running_mean, first->norm->running_mean, 1e-12, 0));
    EXPECT_TRUE(at::allclose(model->norm->running_var, own->norm->running_var, 1e-12, 0)) << "ignored";
  });
}

// The graph has saved the running statistics; the second backward is rejected where they were written to.
TEST(DistributedAloneTest, BuffersThatAreTheSameAlreadyAreNotWrittenTo) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    DistributedDataParallel<OptionalSecond> model(make_optional_second(), group);
    model.forward(wave(6)).square().mean().backward();
    model->eval();
    const at::Tensor x = wave(4).requires_grad_();
    const at::Tensor loss = model.forward(x).square().mean();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(torch::autograd::grad({loss}, {x})[0].defined());
  });
}

TEST(DistributedAloneTest, AModelIsTrainedInEvaluationModeToo) {
  OptionalSecond whole = make_optional_second();
  whole->eval();
  whole->forward(wave(6)).square().mean().backward();
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    DistributedDataParallel<OptionalSecond> model(make_optional_second(), group);
    model->eval();
    model.forward(share_of(wave(6), group.rank(), 2)).square().mean().backward();
    EXPECT_TRUE(at::allclose(model->first->weight.grad(), whole->first->weight.grad(), 1e-12, 0));
  });
}

// What a static graph is learnt from is a backward, and not that there was none.
TEST(DistributedAloneTest, AStaticGraphMayBeginOnARankWithoutSamples) {
  Stack whole = make_stack();
  whole->forward(wave(4)).square().mean().backward();
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    DistributedOptions options;
    options.static_graph = true;
    DistributedDataParallel<Stack> model(make_stack(), group, options);
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const bool has_samples = step > 0 || group.rank() == 1;
      const at::Tensor share = step == 0 ? wave(4) : share_of(wave(4), group.rank(), 2);
      model.set_weight(static_cast<double>(share.size(0)));
      if (has_samples) {
        model.forward(share).square().mean().backward();
      } else {
        model.step_without_samples();
      }
      EXPECT_TRUE(at::allclose(model->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0))
          << step;
    }
  });
}

// A rank whose loss uses no parameter at all: its backward still takes part.
TEST(DistributedAloneTest, ABackwardThatReachesNoParameterTakesPart) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    struct ForkedImpl : torch::nn::Module {
      ForkedImpl() { inner = register_module("inner", make_stack()); }
      at::Tensor forward(const at::Tensor& x, bool uses) { return uses ? inner->forward(x) : x * 2; }
      Stack inner = nullptr;
    };
    DistributedOptions options;
    options.find_unused_parameters = true;
    DistributedDataParallel<std::shared_ptr<ForkedImpl>> model(std::make_shared<ForkedImpl>(), group,
                                                               options);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const at::Tensor x = wave(4).requires_grad_();
      model.forward(x, group.rank() == 0).sum().backward();
      Stack alone = make_stack();
      alone->forward(wave(4)).sum().backward();
      EXPECT_TRUE(at::allclose(model->inner->layers[0]->weight.grad(), alone->layers[0]->weight.grad() / 2,
                               1e-12, 0));
    }
  });
}

}  // namespace
}  // namespace cohort::parallel
