// What a step may leave out, repeat or add up: unused parameters, ranks without samples, several backwards.
#include <gtest/gtest.h>

#include <algorithm>

#include "cohort/parallel/reducer.h"
#include "tests/parallel/training.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::Descent;
using test::expect_near;
using test::loss_of;
using test::make_stack;
using test::share_of;
using test::Stack;
using test::train_alone;
using test::wave;

// The names in all buckets, sorted.
std::vector<std::string> each_once(const std::vector<std::vector<std::string>>& buckets) {
  std::vector<std::string> names;
  for (const auto& bucket : buckets) names.insert(names.end(), bucket.begin(), bucket.end());
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names = module.named_parameters().keys();
  std::ranges::sort(names);
  return names;
}

TEST(ReducerStepsTest, ParametersThatOnlyOtherRanksUseAreAveragedAndWhatNobodyUsesStays) {
  for (const bool is_static : {false, true}) {
    test::run_ranks(3, is_static ? "gloo" : "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      ReducerOptions options{.first_bucket_bytes = 1, .bucket_cap_bytes = 1};
      (is_static ? options.static_graph : options.find_unused_parameters) = true;
      Reducer reducer(group, parameters_to_reduce(*net), options);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        const at::Tensor out = net->forward_to(wave(2), group.rank() == 0 ? 3 : 2);  // layer3: nobody
        reducer.prepare({{out}});
        out.square().mean().backward();
        Stack alone = make_stack();
        alone->forward_to(wave(2), 3).square().mean().backward();
        EXPECT_FALSE(net->layers[3]->weight.grad().defined()) << step;
        ASSERT_TRUE(net->layers[2]->weight.grad().defined()) << step;
        EXPECT_TRUE(
            at::allclose(net->layers[2]->weight.grad(), alone->layers[2]->weight.grad() / 3, 1e-12, 0))
            << step;
      }
    });
  }
}

TEST(ReducerStepsTest, WhatIsLeftOutIsNamedWhenNobodyLooksForIt) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    reducer.prepare();
    net->forward_to(wave(2), 3).square().mean().backward();
    COHORT_EXPECT_THROW_WITH(reducer.prepare(), UsageError,
                             "backward left 2 of 8 parameters without a gradient, so not all were averaged: "
                             "layer3.bias, layer3.weight. Try: find_unused_parameters");
    COHORT_EXPECT_THROW_WITH(reducer.finish(), UsageError, "backward left 2 of 8 parameters");
  });
}

TEST(ReducerStepsTest, WithoutOutputsToStartFromFinishFindsWhatIsUnused) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net), {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const at::Tensor out = net->forward_to(wave(2), group.rank() == 0 ? 3 : 2);
      reducer.prepare();
      out.square().mean().backward();
      reducer.finish();
      EXPECT_FALSE(net->layers[3]->weight.grad().defined());
      Stack alone = make_stack();
      alone->forward_to(wave(2), 3).square().mean().backward();
      EXPECT_TRUE(at::allclose(net->layers[2]->weight.grad(), alone->layers[2]->weight.grad() / 2, 1e-12, 0));
    }
    reducer.prepare();
    net->forward_to(wave(2), 3).square().mean().backward();
    COHORT_EXPECT_THROW_WITH(reducer.prepare(), UsageError,
                             "Try: prepare(outputs), or finish() after backward");
  });
}

TEST(ReducerStepsTest, ARankWithoutSamplesTakesPart) {
  const Stack whole = train_alone(1);
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net), {.norm = true});
    Descent descent(*net);
    reducer.prepare(StepInfo{.weight = group.rank() == 0 ? 7.0 : 0.0});
    if (group.rank() == 0) loss_of(net, wave(7)).backward();
    const ReduceReport report = reducer.finish();
    EXPECT_EQ(report.weight, 7);
    double squares = 0;
    for (const at::Tensor& parameter : net->parameters())
      squares += parameter.grad().square().sum().item<double>();
    EXPECT_NEAR(*report.norm, std::sqrt(squares), 1e-12);
    descent.step();
    expect_near(net, whole, 1e-13);
  });
}

TEST(ReducerStepsTest, NumbersThatAreNotFiniteOnOneRankStopAllBeforeAnythingIsReduced) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    Stack net = make_stack(), alone = make_stack(), whole = make_stack();
    loss_of(alone, wave(2) * (group.rank() + 1)).backward();
    for (int rank = 0; rank < 3; ++rank) (loss_of(whole, wave(2) * (rank + 1)) / 3).backward();
    Reducer reducer(group, parameters_to_reduce(*net), {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
    constexpr int kBad = 2;  // what comes in these is no order of arrival
    for (int round = 0; round < kBad + 3; ++round) {
      net->zero_grad();
      const at::Tensor loss = loss_of(net, wave(2) * (group.rank() + 1));
      const bool is_bad = round < kBad && group.rank() == 1;
      reducer.prepare(StepInfo{.weight = 1, .finite = !is_bad});
      if (!is_bad) loss.backward();
      const ReduceReport report = reducer.finish();
      EXPECT_EQ(report.bad_rank, round < kBad ? std::optional(1) : std::nullopt);
      EXPECT_EQ(each_once(reducer.buckets()), names_of(*net)) << round;
      if (is_bad) continue;
      for (std::size_t i = 0; i < 4; ++i) {
        const at::Tensor& gradient = net->layers[i]->weight.grad();
        if (round < kBad) {
          EXPECT_TRUE(at::equal(gradient, alone->layers[i]->weight.grad())) << round;
        } else {
          EXPECT_TRUE(at::allclose(gradient, whole->layers[i]->weight.grad(), 1e-12, 1e-15)) << round;
        }
      }
    }
  });
}

TEST(ReducerStepsTest, ABackwardThatWeighsNothingSaysNothingOfTheOrderOfArrival) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net), {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
    for (int round = 0; round < 4; ++round) {
      net->zero_grad();
      reducer.prepare(StepInfo{.weight = round < 2 ? 0.0 : 1.0});
      loss_of(net, wave(2)).backward();
      reducer.finish();
      EXPECT_EQ(each_once(reducer.buckets()), names_of(*net)) << round;
    }
  });
}

TEST(ReducerStepsTest, BackwardsUnderNoSyncAddUpUntilOneReduces) {
  const Stack whole = [] {
    Stack net = make_stack();
    for (int part = 0; part < 3; ++part) loss_of(net, wave(4) + part).backward();
    return net;
  }();
  for (const bool as_view : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      Reducer reducer(group, parameters_to_reduce(*net), {.gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        // Zeroed in place the second time: gradients then add up in the buckets themselves.
        net->zero_grad(step != 1);
        for (int part = 0; part < 3; ++part) {
          const at::Tensor share = share_of(wave(4) + part, group.rank(), 2);
          if (part < 2) {
            // Also where one was prepared that no backward followed.
            if (part == 1) reducer.prepare();
            const Reducer::NoSync silent(reducer);
            loss_of(net, share).backward();
          } else {
            const at::Tensor loss = loss_of(net, share);
            reducer.prepare();
            loss.backward();
          }
        }
        for (std::size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(at::allclose(net->layers[i]->weight.grad(), whole->layers[i]->weight.grad(), 1e-12, 0))
              << step << " " << i;
        }
      }
    });
  }
}

TEST(ReducerStepsTest, SeveralForwardsBeforeABackwardAndBackwardsOverPartsOfTheModel) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const at::Tensor share = share_of(wave(4), group.rank(), 2);
    Stack whole = make_stack();
    (loss_of(whole, wave(4)) + loss_of(whole, wave(4) * 2)).backward();
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    const at::Tensor first = loss_of(net, share);
    reducer.prepare();
    const at::Tensor second = loss_of(net, share * 2);
    reducer.prepare();
    (first + second).backward();
    EXPECT_TRUE(at::allclose(net->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));

    // Two heads of one step, gone back through one after the other.
    Stack heads = make_stack();
    Reducer each(group, parameters_to_reduce(*heads));
    const at::Tensor left = heads->layers[0]->forward(share).square().mean();
    const at::Tensor right = heads->layers[3]
                                 ->forward(heads->layers[2]->forward(
                                     heads->layers[1]->forward(heads->layers[0]->forward(share).detach())))
                                 .square()
                                 .mean();
    each.prepare();
    left.backward();
    right.backward();
    EXPECT_EQ(each.finish().bytes, 8 * (5 * 7 + 7 + 7 * 6 + 6 + 6 * 7 + 7 + 7 * 3 + 3));
  });
}

TEST(ReducerStepsTest, ASecondBackwardThatWouldAddThisRanksGradientsAloneIsAnError) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    reducer.prepare();
    const at::Tensor loss = loss_of(net, wave(2));
    loss.backward({}, true);
    COHORT_EXPECT_THROW_WITH(loss.backward(), UsageError,
                             "a second backward reached layer3.bias after the gradients");
    reducer.prepare();
    COHORT_EXPECT_THROW_WITH(loss_of(net, wave(2)).backward({}, true, true), UsageError,
                             "backward with create_graph");
  });
}

// On a rank whose outputs reach no parameter all buckets travel when the backward begins, or at its end.
TEST(ReducerStepsTest, AHookThatThrowsBreaksTheReducerWhereverItIsCalled) {
  for (const bool is_static : {false, true}) {
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      Stack net = make_stack();
      ReducerOptions options;
      (is_static ? options.static_graph : options.find_unused_parameters) = true;
      options.hook = [](const HookBucket&) -> std::unique_ptr<Reduction> {
        throw DataError("test", "this hook fails");
      };
      Reducer reducer(group, parameters_to_reduce(*net), options);
      const at::Tensor x = wave(2).requires_grad_();
      const at::Tensor out = group.rank() == 0 ? net->forward(x) : x * 2;
      reducer.prepare({{out}});
      COHORT_EXPECT_THROW_WITH(out.sum().backward(), Error, "this hook fails");
      COHORT_EXPECT_THROW_WITH(reducer.prepare({{out}}), UsageError, "ranks no longer agree");
    });
  }
}

TEST(ReducerStepsTest, FinishIsRejectedWhileNothingIsReduced) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    reducer.prepare();
    const Reducer::NoSync silent(reducer);
    COHORT_EXPECT_THROW_WITH(reducer.finish(), UsageError, "finish() while a NoSync lives");
  });
}

}  // namespace
}  // namespace cohort::parallel
