// A stage is held at an action until its step has timed out, at every action of every schedule. The next step
// has the bits of a step without that one.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/balance.h"
#include "tests/pipeline/held_job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

// Who opens the place, and when the caller begins anew.
enum class Then {
  kWaits,     // the caller waits for late stages, and then restores everything
  kContinues  // the caller makes the next step, which waits, and restores everything if that rejects
};

// False: the machine was too slow for this timeout.
bool hold_and_compare(const Program& program, const Place& place, Then then, milliseconds timeout,
                      const Tensors& expected, const Tensors& expected_buffers) {
  Job job(program, place, timeout);
  job.restore();
  std::string message;
  try {
    job.step();
  } catch (const TimeoutError& error) {
    message = error.what();
  }
  if (!job.holder->was_reached()) return false;
  const std::string who =
      base::concat("is in the ", name_of(place.action.kind), " of micro-batch ", place.action.micro_batch);
  EXPECT_TRUE(
      cohort::test::message_contains(message, base::concat("waited ", timeout.count(), " ms for a step")));
  EXPECT_TRUE(
      cohort::test::message_contains(message, base::concat("stage ", place.action.stage, " (held) on ")));
  EXPECT_TRUE(cohort::test::message_contains(message, who));

  std::thread opens;
  bool is_restored = false;
  const auto restore = [&] {
    job.restore();
    is_restored = true;
  };
  try {
    if (then == Then::kWaits) {
      job.holder->open();
      job.pipe->wait_for_late_stages();
      restore();
    } else {
      torch::manual_seed(4);
      opens = std::thread([holder = job.holder] {
        std::this_thread::sleep_for(10ms);
        holder->open();
      });
    }
    at::Tensor result;
    try {
      result = job.step();
    } catch (const UsageError& error) {  // there are gradients, and no stage that still adds to them
      EXPECT_EQ(then, Then::kContinues);
      EXPECT_TRUE(cohort::test::message_contains(error.what(), "zero_grad()"));
      restore();
      result = job.step();
    }
    if (opens.joinable()) opens.join();
    job.pipe->wait_for_late_stages();  // of which there are none
    expect_same_bits(job.results(result), expected, "result");
    if (is_restored) expect_same_bits(job.buffers, expected_buffers, "buffer");
    return true;
  } catch (const TimeoutError&) {
    job.holder->open();
    if (opens.joinable()) opens.join();
    return false;
  }
}

struct HeldCase {
  std::size_t program;
  Place place;
  Then then;
};

std::vector<HeldCase> all_cases(const std::vector<Program>& programs) {
  std::vector<HeldCase> all;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    for (const Place& place : programs[i].places()) {
      for (const Then then : {Then::kWaits, Then::kContinues}) all.push_back({i, place, then});
    }
  }
  return all;
}

// Each kind of place once, in any program and stage, for either caller.
std::vector<HeldCase> some_of(std::vector<HeldCase> cases) {
  std::shuffle(cases.begin(), cases.end(), std::mt19937(1));
  std::set<std::tuple<ActionKind, Point, Then>> seen;
  std::erase_if(cases, [&](const HeldCase& each) {
    return !seen.emplace(each.place.action.kind, each.place.point, each.then).second;
  });
  return cases;
}

TEST(TimeoutsTest, AStageHeldAtAnyActionTouchesNoLaterStep) {
  const std::vector<Program> all = programs();
  struct Expected {
    Tensors results, buffers;
  };
  std::vector<Expected> expected;
  for (const Program& program : all) {
    Job sound(program, std::nullopt, 60s);
    sound.restore();
    const Tensors results = sound.results(sound.step());
    expected.push_back({results, sound.buffers});
  }
  std::vector<HeldCase> cases = all_cases(all);
  if (std::getenv("COHORT_HOLD_EVERYWHERE") == nullptr) cases = some_of(std::move(cases));
  for (const HeldCase& each : cases) {
    const Program& program = all[each.program];
    SCOPED_TRACE(base::concat(to_string(program.schedule), ", use ", static_cast<int>(program.use), ", ",
                              to_string(each.place.action), ", point ", static_cast<int>(each.place.point),
                              ", then ", static_cast<int>(each.then)));
    milliseconds timeout = 80ms;
    while (!hold_and_compare(program, each.place, each.then, timeout, expected[each.program].results,
                             expected[each.program].buffers)) {
      timeout *= 5;
      ASSERT_LT(timeout, 60s) << "no step came to this place, or the next one did not end";
    }
    if (HasFailure()) return;
  }
}

constexpr milliseconds kTimeout = 1500ms;

PipelineOptions two_placements() {
  PipelineOptions options;
  options.placements = placements(2);
  options.num_micro_batches = 2;
  options.timeout = kTimeout;
  return options;
}

// Holds one call, when it is told to.
struct Once {
  void pass() {
    if (!holds.exchange(false)) return;
    is_held.open();
    gate.wait();
  }
  std::atomic<bool> holds{false};
  cohort::test::Gate is_held, gate;
};

Tensors dense_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad().to_dense().clone());
  return gradients;
}

TEST(TimeoutsTest, AStepAfterALateForwardAddsToTheGradientsOfEarlierSteps) {
  const auto once = std::make_shared<Once>();
  const Stage held(
      [once](const Tensors& in) {
        once->pass();
        return Tensors{in.at(0) * 2};
      },
      {});
  Pipeline pipe({torch::nn::Linear(4, 4), held}, two_placements());
  const at::Tensor input = torch::randn({8, 4}), target = torch::randn({8, 4});
  Tensors gradients[2];
  for (const bool is_late : {false, true}) {
    zero_grad(pipe.parameters());
    pipe.step(input, target, mse);
    if (is_late) {
      once->holds = true;
      EXPECT_THROW(pipe.forward(input), TimeoutError);
      once->gate.open();
    }
    pipe.step(input, target, mse);
    gradients[is_late] = dense_gradients(pipe.parameters());
  }
  expect_same_bits(gradients[1], gradients[0]);
}

TEST(TimeoutsTest, SparseGradientsOfALateStageAreRejectedUntilTheyAreZero) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  const auto once = std::make_shared<Once>();
  embedding->weight.register_hook([once](const at::Tensor& gradient) {
    once->pass();
    return gradient;
  });
  Pipeline pipe({embedding, torch::nn::Linear(4, 4)}, two_placements());
  const at::Tensor input = torch::randint(10, {8}), target = torch::randn({8, 4});
  pipe.step(input, target, mse);
  ASSERT_TRUE(embedding->weight.grad().is_sparse());
  const Tensors expected = dense_gradients(pipe.parameters());
  zero_grad(pipe.parameters());
  once->holds = true;
  EXPECT_THROW(pipe.step(input, target, mse), TimeoutError);
  once->gate.open();
  COHORT_EXPECT_THROW_WITH(pipe.step(input, target, mse), UsageError, "zero_grad()");
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad().zero_();
  pipe.step(input, target, mse);
  expect_same_bits(dense_gradients(pipe.parameters()), expected);
}

TEST(TimeoutsTest, OfAStepThatThrewThoseThatStillRunAreNamed) {
  const auto once = std::make_shared<Once>();
  const Stage late = Stage(
                         [once, calls = std::make_shared<int>(0)](const Tensors& in) {
                           if ((*calls)++ == 1) once->pass();
                           return in;
                         },
                         {})
                         .name("late");
  const auto throws = std::make_shared<std::atomic<bool>>(true);
  const Stage sound(
      [once, throws](const Tensors& in) {
        if (*throws) {
          once->is_held.wait();
          throw DataError("user.code", "no more of it");
        }
        return in;
      },
      {});
  Pipeline pipe({late, sound, torch::nn::Linear(4, 4)}, [] {
    PipelineOptions options = two_placements();
    options.placements = placements(3);
    return options;
  }());
  const at::Tensor input = torch::randn({8, 4}), target = torch::randn({8, 4});
  once->holds = true;
  COHORT_EXPECT_THROW_WITH(pipe.step(input, target, mse), StageError, "no more of it");
  try {
    pipe.step(input, target, mse);
    ADD_FAILURE() << "threw nothing";
  } catch (const TimeoutError& error) {
    const std::string message = error.what();
    EXPECT_TRUE(cohort::test::message_contains(
        message, "ms for an earlier step: stage 0 (late) on cpu:0/a is in the forward of micro-batch 1"));
    EXPECT_EQ(message.find("stage 1"), std::string::npos) << message;
  }
  once->gate.open();
  *throws = false;
  pipe.wait_for_late_stages();
  pipe.step(input, target, mse);
}

TEST(TimeoutsTest, AStepWhosePlacementGetsANewThreadEndsAtOnce) {
  PipelineOptions options = two_placements();
  options.timeout = 60s;
  const auto worker = parallel::PlacementWorker::of(options.placements.at(1));
  const auto held = std::make_shared<cohort::test::Gate>(),
             is_first_done = std::make_shared<cohort::test::Gate>();
  base::Future<void> stuck = worker->submit("user's code", [held] { held->wait(); });
  const Stage first(
      [is_first_done](const Tensors& in) {
        is_first_done->open();
        return in;
      },
      {});
  Pipeline pipe({first, torch::nn::Linear(4, 4)}, options);
  std::string message;
  std::chrono::steady_clock::time_point end;
  std::thread steps([&] {
    try {
      pipe.step(torch::randn({8, 4}), torch::randn({8, 4}), mse);
    } catch (const TimeoutError& error) {
      message = error.what();
    }
    end = std::chrono::steady_clock::now();
  });
  is_first_done->wait();
  // The step of the second placement waits behind it.
  ASSERT_TRUE(cohort::test::comes_true([&] { return worker->num_queued() == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  stuck.abandon();
  worker->submit("another one", [] {}).get(base::Deadline(10s));  // on a new thread
  steps.join();
  held->open();
  EXPECT_TRUE(cohort::test::message_contains(message, "was given up, as it is"));
  EXPECT_LT(end - begin, 10s);
}

TEST(TimeoutsTest, WhatPutsGradientsBackWaitsForLateStages) {
  torch::nn::Linear last(4, 4);
  std::atomic<bool> sleeps{false}, has_ended{false};
  last->weight.register_hook([&](const at::Tensor& gradient) {
    if (sleeps.exchange(false)) {
      std::this_thread::sleep_for(kTimeout * 5 / 4);
      has_ended = true;
    }
    return gradient;
  });
  const Stage model(torch::nn::Sequential(torch::nn::Linear(4, 4), last));
  const at::Tensor input = torch::randn({8, 4}), target = torch::randn({8, 4});
  const auto profiles = [&] { profile_layers(model, input, {.repeats = 1, .timeout = kTimeout}); };
  const auto tunes = [&] {
    tune({model.part(0, 1), model.part(1, 2)}, two_placements(), {input}, {target},
         [](const Tensors& out, const Tensors& wanted) { return mse(out.at(0), wanted.at(0)); },
         {.split_sizes = {4}, .repeats = 1});
  };
  // Somebody else has the same placements, so their threads do not end with the call.
  const auto first = parallel::PlacementWorker::of(base::Placement::parse("cpu:0"));
  const Pipeline other({torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)}, two_placements());
  for (const std::function<void()>& call : {std::function<void()>(profiles), std::function<void()>(tunes)}) {
    sleeps = true;
    has_ended = false;
    EXPECT_THROW(call(), TimeoutError);
    EXPECT_TRUE(has_ended) << "gradients were restored before";
    const base::Deadline deadline(10s);
    while (!has_ended && !deadline.expired()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(last->weight.grad().defined());
  }
}

}  // namespace
}  // namespace cohort::pipeline
