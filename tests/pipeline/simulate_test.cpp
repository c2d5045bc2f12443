#include "cohort/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

// Every plan that make_plan() makes of small numbers.
std::vector<PlanOptions> small_plans() {
  std::vector<PlanOptions> plans;
  for (int placements = 1; placements <= 6; ++placements) {
    for (int micro_batches = 1; micro_batches <= 17; ++micro_batches) {
      plans.push_back({Schedule::kOneFOneB, placements, placements, micro_batches});
      plans.push_back({Schedule::kZeroBubble, placements, placements, micro_batches});
      for (int chunks = 1; chunks <= 3; ++chunks) {
        plans.push_back({Schedule::kFillDrain, placements * chunks, placements, micro_batches});
        if (chunks > 1)
          plans.push_back({Schedule::kInterleaved, placements * chunks, placements, micro_batches});
      }
    }
  }
  return plans;
}

TEST(SimulateTest, NoPlanWaitsForEverWithTheRoomThatItAsksFor) {
  for (const PlanOptions& options : small_plans()) {
    const Plan plan = make_plan(options);
    const int capacity = channel_capacity(plan);
    SCOPED_TRACE(base::concat(to_string(options.schedule), " ", options.num_stages, " on ",
                              options.num_placements, ", ", options.num_micro_batches,
                              " micro-batches, capacity ", capacity));
    const Simulation any = simulate(plan), bounded = simulate(plan, {.channel_capacity = capacity});
    EXPECT_DOUBLE_EQ(any.time, bounded.time) << "nobody waits to send";
    const Simulation forwards = simulate(forward_part(plan), {.channel_capacity = capacity});
    EXPECT_LE(forwards.time, any.time);
    const Plan backwards = backward_part(make_plan(
        {Schedule::kFillDrain, options.num_stages, options.num_placements, options.num_micro_batches}));
    EXPECT_NO_THROW(simulate(backwards, {.channel_capacity = channel_capacity(backwards)}));
  }
}

TEST(SimulateTest, BubbleIsThatOfTheFormula) {
  for (const PlanOptions& options : small_plans()) {
    if (options.num_micro_batches < options.num_placements) continue;
    if (options.schedule == Schedule::kInterleaved && options.num_micro_batches % options.num_placements != 0)
      continue;
    // Fill-drain's formula is for one stage per placement.
    if (options.schedule == Schedule::kFillDrain && options.num_stages != options.num_placements) continue;
    SCOPED_TRACE(base::concat(to_string(options.schedule), " ", options.num_stages, " on ",
                              options.num_placements, ", ", options.num_micro_batches, " micro-batches"));
    const StageCosts equal, real{.forward = 1, .input_gradient = 1.1, .weight_gradient = 0.9};
    for (const StageCosts& costs : {equal, real}) {
      EXPECT_NEAR(simulate(make_plan(options), {.costs = {costs}}).bubble, bubble_formula(options, costs),
                  1e-9);
    }
  }
}

TEST(SimulateTest, MemoryIsThatOfTheFormula) {
  const StageCosts costs{.activation = 3, .weight_part = 2};
  for (const PlanOptions& options : small_plans()) {
    const int rest = options.num_micro_batches % options.num_placements;
    if (options.schedule == Schedule::kInterleaved && rest != 0) continue;
    SCOPED_TRACE(base::concat(to_string(options.schedule), " ", options.num_stages, " on ",
                              options.num_placements, ", ", options.num_micro_batches, " micro-batches"));
    const Simulation simulation = simulate(make_plan(options), {.costs = {costs}});
    for (int placement = 0; placement < options.num_placements; ++placement) {
      EXPECT_DOUBLE_EQ(simulation.peak_memory[static_cast<std::size_t>(placement)],
                       memory_formula(options, placement, costs))
          << "placement " << placement;
    }
  }
}

TEST(SimulateTest, FormulasRejectNumbersThatNoPipelineHas) {
  const PlanOptions no_stage{Schedule::kOneFOneB, 0}, more_placements{Schedule::kOneFOneB, 2, 3},
      no_micro_batch{Schedule::kOneFOneB, 1, 1, 0};
  COHORT_EXPECT_THROW_WITH(bubble_formula(no_stage), UsageError, "got 0 stages on 0 placements");
  COHORT_EXPECT_THROW_WITH(memory_formula(no_stage, 0), UsageError, "got 0 stages on 0 placements");
  COHORT_EXPECT_THROW_WITH(bubble_formula(more_placements), UsageError, "got 2 stages on 3 placements");
  COHORT_EXPECT_THROW_WITH(bubble_formula(no_micro_batch), UsageError, "and 0 micro-batches");
}

COHORT_REGISTER_PIPELINE_SCHEDULE("forwards_first", {.order = [](const PlaceInPipeline& place) {
                                    constexpr int kAll = std::numeric_limits<int>::max();
                                    return ActionOrder{.group = place.num_micro_batches, .warm_up = kAll};
                                  }});

TEST(SimulateTest, AWarmUpAboveTheNumberOfForwardsIsAllOfThem) {
  const PlanOptions options{Schedule("forwards_first"), 4, 2, 3};
  EXPECT_EQ(make_plan(options).text(), make_plan({Schedule::kFillDrain, 4, 2, 3}).text());
  EXPECT_DOUBLE_EQ(memory_formula(options, 0, {.activation = 5}), 2 * 3 * 5);
}

TEST(SimulateTest, SchedulesAreRankedAsTheirPapersSay) {
  const auto bubble = [](Schedule schedule, int stages) {
    return simulate(make_plan({schedule, stages, 4, 8})).bubble;
  };
  EXPECT_DOUBLE_EQ(bubble(Schedule::kFillDrain, 4), 3.0 / 11.0);
  EXPECT_DOUBLE_EQ(bubble(Schedule::kOneFOneB, 4), 3.0 / 11.0);
  EXPECT_DOUBLE_EQ(bubble(Schedule::kInterleaved, 8), 1.5 / 9.5);
  EXPECT_DOUBLE_EQ(bubble(Schedule::kZeroBubble, 4), 1.0 / 9.0);
}

TEST(SimulateTest, SlowHandOversTakeTime) {
  const Plan plan = make_plan({Schedule::kFillDrain, 2, 0, 1});
  EXPECT_DOUBLE_EQ(simulate(plan).time, 6);
  EXPECT_DOUBLE_EQ(simulate(plan, {.costs = {{.send = 0.5}}}).time, 7);
}

TEST(SimulateTest, UnequalStagesCostWhatTheSlowestDoes) {
  const Plan plan = make_plan({Schedule::kOneFOneB, 2, 0, 10});
  const StageCosts slow{.forward = 2, .input_gradient = 2, .weight_gradient = 2};
  EXPECT_DOUBLE_EQ(simulate(plan, {.costs = {StageCosts(), slow}}).time, 1 + 10 * 6 + 2);
}

// Runs the plan in this order of placements: true where each placement finds what it waits for, and room for
// what it sends.
bool goes_through(const Plan& plan, const std::vector<int>& order_of_placements, int capacity) {
  std::vector<std::size_t> next(plan.actions.size());
  std::map<std::pair<int, bool>, int> queued;
  const auto advance = [&](int placement) {  // up to what computes
    std::size_t& at = next[static_cast<std::size_t>(placement)];
    const auto& actions = plan.actions[static_cast<std::size_t>(placement)];
    for (; at < actions.size() && !actions[at].computes(); ++at) {
      const auto [kind, stage, micro_batch] = actions[at];
      const bool gradient = kind == ActionKind::kSendGradient || kind == ActionKind::kReceiveGradient;
      if (kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient) {
        int& count = queued[{gradient ? stage - 1 : stage + 1, gradient}];
        if (count == capacity) return;
        ++count;
      } else {
        int& count = queued[{stage, gradient}];
        if (count == 0) return;
        --count;
      }
    }
  };
  const auto all_advance = [&] {
    for (int round = 0; round < 2 * plan.num_placements(); ++round) {
      for (int placement = 0; placement < plan.num_placements(); ++placement) advance(placement);
    }
  };
  for (const int placement : order_of_placements) {
    all_advance();
    std::size_t& at = next[static_cast<std::size_t>(placement)];
    const auto& actions = plan.actions[static_cast<std::size_t>(placement)];
    if (at == actions.size() || !actions[at].computes()) return false;
    ++at;
  }
  all_advance();
  for (std::size_t i = 0; i < next.size(); ++i) {
    if (next[i] != plan.actions[i].size()) return false;
  }
  return true;
}

TEST(SimulateTest, EveryPlanGoesThroughWithAnyPlacementAhead) {
  for (const PlanOptions& options : small_plans()) {
    const Plan plan = make_plan(options);
    const int capacity = channel_capacity(plan);
    for (int run_ahead = 0; run_ahead < plan.num_placements(); ++run_ahead) {
      EXPECT_TRUE(goes_through(plan, serialized_order(plan, run_ahead, capacity), capacity))
          << to_string(options.schedule) << ", " << options.num_stages << " on " << options.num_placements
          << ", " << options.num_micro_batches << " micro-batches, run_ahead " << run_ahead;
    }
  }
}

TEST(SimulateTest, WhoIsAheadWaitsForWhatItNeedsAlone) {
  const Plan plan = make_plan({Schedule::kOneFOneB, 2, 0, 3});
  // F0.0 F0.1, F1.0 B1.0, B0.0 F0.2, F1.1 B1.1, B0.1, F1.2 B1.2, B0.2
  EXPECT_EQ(serialized_order(plan, 0, 1), (std::vector<int>{0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0}));
  EXPECT_EQ(serialized_order(plan, 1, 1), (std::vector<int>{0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0}));
}

TEST(SimulateTest, NamesWhoWaitsForEver) {
  Plan plan = make_plan({Schedule::kOneFOneB, 2, 0, 2});
  std::swap(plan.actions[0][0], plan.actions[0][4]);  // receives a gradient before it has sent anything
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError,
                           "deadlock: placement 0 at rG0.0, placement 1 at rA1.0 wait for ever");
  const Plan chunks = make_plan({Schedule::kFillDrain, 6, 3, 17});
  ASSERT_GT(channel_capacity(chunks), 1);
  SimulateOptions tight;
  tight.channel_capacity = 1;
  COHORT_EXPECT_THROW_WITH(simulate(chunks, tight), UsageError,
                           "wait for ever with room for 1 between two stages. Try: more room");
}

TEST(SimulateTest, RejectsPlansThatAreNotOne) {
  const Plan good = make_plan({Schedule::kOneFOneB, 2, 0, 2});
  Plan plan = good;
  std::swap(plan.actions[1][1], plan.actions[1][2]);
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError, "B1.0 on placement 1: before its forward");
  plan = good;
  plan.actions[1][2].micro_batch = 1;
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError, "not in the order of the micro-batches");
  plan = good;
  plan.actions[1][0].micro_batch = 1;
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError, "rA1.1 on placement 1 got micro-batch 0");
  plan = good;
  plan.actions[0].pop_back();
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError,
                           "stage 0 does the backward of 1 micro-batches, expected 2");
  plan = good;
  plan.actions[0].pop_back();
  plan.actions[0].pop_back();
  COHORT_EXPECT_THROW_WITH(simulate(plan), UsageError, "stage 0 never receives micro-batch 1");
  SimulateOptions three;
  three.costs.resize(3);
  COHORT_EXPECT_THROW_WITH(simulate(good, three), UsageError, "got costs of 3 stages, expected 1 or 2");
}

}  // namespace
}  // namespace cohort::pipeline
