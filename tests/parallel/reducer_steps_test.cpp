// What a step may leave out, repeat or add up: unused parameters, ranks without samples, several backwards.
#include <gtest/gtest.h>

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
    reducer.prepare(Contribution{.weight = group.rank() == 0 ? 7.0 : 0.0});
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
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    for (int round = 0; round < 2; ++round) {
      net->zero_grad();
      const at::Tensor loss = loss_of(net, wave(2) * (group.rank() + 1));
      const bool is_bad = round == 0 && group.rank() == 1;
      reducer.prepare(Contribution{.weight = 1, .finite = !is_bad});
      if (!is_bad) loss.backward();
      const ReduceReport report = reducer.finish();
      EXPECT_EQ(report.bad_rank, round == 0 ? std::optional(1) : std::nullopt);
      Stack alone = make_stack();
      loss_of(alone, wave(2) * (group.rank() + 1)).backward();
      if (!is_bad) {
        EXPECT_EQ(at::equal(net->layers[0]->weight.grad(), alone->layers[0]->weight.grad()), round == 0);
      }
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
          const at::Tensor mine = share_of(wave(4) + part, group.rank(), 2);
          if (part < 2) {
            // Also where one was prepared that no backward followed.
            if (part == 1) reducer.prepare();
            const Reducer::NoSync silent(reducer);
            loss_of(net, mine).backward();
          } else {
            const at::Tensor loss = loss_of(net, mine);
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
    const at::Tensor mine = share_of(wave(4), group.rank(), 2);
    Stack whole = make_stack();
    (loss_of(whole, wave(4)) + loss_of(whole, wave(4) * 2)).backward();
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    const at::Tensor first = loss_of(net, mine);
    reducer.prepare();
    const at::Tensor second = loss_of(net, mine * 2);
    reducer.prepare();
    (first + second).backward();
    EXPECT_TRUE(at::allclose(net->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));

    // Two heads of one step, gone back through one after the other.
    Stack heads = make_stack();
    Reducer each(group, parameters_to_reduce(*heads));
    const at::Tensor left = heads->layers[0]->forward(mine).square().mean();
    const at::Tensor right = heads->layers[3]
                                 ->forward(heads->layers[2]->forward(
                                     heads->layers[1]->forward(heads->layers[0]->forward(mine).detach())))
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

}  // namespace
}  // namespace cohort::parallel
