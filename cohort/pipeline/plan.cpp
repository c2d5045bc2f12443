// A plan is written placement by placement, without a search: the schedule gives an order of turns and two
// numbers for each. A receive stands right before the computation that needs it, and a send right after the
// computation that made it. Stages of the same placement hand over without either. Weight gradients of a
// backward that is split are written later than its input gradients, up to the number that may wait.
#include "cohort/pipeline/plan.h"

#include <algorithm>
#include <array>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::pipeline {
namespace {

using base::concat;
constexpr const char* kWherePlan = "pipeline.plan";

// A stage of this placement, counted from its first, and a micro-batch.
struct ChunkTurn {
  int chunk;
  int micro_batch;
};

// Note [One generator]
// The orders are the same on every placement, so what one sends is what the next expects; chunks take turns
// by groups of micro-batches, as many as there are placements, so that the first chunk's later micro-batches
// do not hold up the second chunk's first. Where the last group is smaller, the order is that of a whole one
// with the micro-batches left out that are not there: what had an end without them still has one.
std::vector<ChunkTurn> chunk_order(int chunks, int micro_batches, int group, bool backward) {
  std::vector<ChunkTurn> order;
  for (int first = 0; first < micro_batches; first += group) {
    for (int i = 0; i < chunks; ++i) {
      for (int m = first; m < first + group; ++m) order.push_back({backward ? chunks - 1 - i : i, m});
    }
  }
  return order;
}

// Writes down what one placement does, with the hand-overs around each computation.
class Writer {
 public:
  Writer(const Plan& plan, int placement) : plan_(plan), placement_(placement) {}

  void forward(ChunkTurn turn) {
    const int stage = stage_of(turn);
    if (is_remote(stage - 1)) add(ActionKind::kReceiveActivation, stage, turn);
    add(ActionKind::kForward, stage, turn);
    if (is_remote(stage + 1)) add(ActionKind::kSendActivation, stage, turn);
  }
  void backward(ChunkTurn turn, ActionKind kind) {
    const int stage = stage_of(turn);
    if (is_remote(stage + 1)) add(ActionKind::kReceiveGradient, stage, turn);
    add(kind, stage, turn);
    if (is_remote(stage - 1)) add(ActionKind::kSendGradient, stage, turn);
  }
  void weights(ChunkTurn turn) { add(ActionKind::kWeightGradient, stage_of(turn), turn); }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  int stage_of(ChunkTurn turn) const { return turn.chunk * plan_.num_placements() + placement_; }
  bool is_remote(int stage) const {
    return stage >= 0 && stage < plan_.num_stages() && plan_.placement_of(stage) != placement_;
  }
  void add(ActionKind kind, int stage, ChunkTurn turn) {
    if (turn.micro_batch < plan_.num_micro_batches()) actions_.push_back({kind, stage, turn.micro_batch});
  }

  const Plan& plan_;
  int placement_;
  std::vector<Action> actions_;
};

std::vector<Action> actions_of(const Plan& plan, const ScheduleType& schedule, int placement) {
  const ActionOrder order = action_order(plan.options, schedule, placement);
  const bool split = plan.splits_backward;
  const auto forwards = chunk_order(plan.num_chunks(), plan.num_micro_batches(), order.group, false);
  const auto backwards = chunk_order(plan.num_chunks(), plan.num_micro_batches(), order.group, true);
  Writer writer(plan, placement);
  std::size_t forward = 0, weights = 0;
  const auto warm_up = std::min<std::size_t>(order.warm_up, forwards.size());
  while (forward < warm_up) writer.forward(forwards[forward++]);
  for (std::size_t backward = 0; backward < backwards.size(); ++backward) {
    if (forward < forwards.size()) writer.forward(forwards[forward++]);
    writer.backward(backwards[backward], split ? ActionKind::kInputGradient : ActionKind::kBackward);
    if (!split) continue;
    // Weight gradients fill what would be idle time, and hold activations until then.
    while (backward + 1 - weights > static_cast<std::size_t>(order.max_waiting)) {
      writer.weights(backwards[weights++]);
    }
  }
  while (split && weights < backwards.size()) writer.weights(backwards[weights++]);
  return writer.take();
}

// Each call of a pipeline makes a plan: a text is made only where it is thrown.
void check(const PlanOptions& options, const ScheduleType& schedule) {
  const auto expect = [](bool right, const char* hint, const auto&... text) {
    if (!right) throw UsageError(kWherePlan, concat(text...), hint);
  };
  expect(options.num_stages > 0, "", "got ", options.num_stages, " stages, expected at least 1");
  expect(options.num_micro_batches > 0, "", "got ", options.num_micro_batches,
         " micro-batches, expected at least 1");
  expect(options.num_placements > 0, "", "got ", options.num_placements, " placements, expected at least 1");
  expect(options.num_stages % options.num_placements == 0,
         "a number of stages that the number of placements divides", "got ", options.num_stages,
         " stages on ", options.num_placements, " placements, expected as many stages on each");
  const int chunks = options.num_stages / options.num_placements;
  const auto reject_stages = [&](const std::string& number, const char* hint) {
    expect(false, hint, "schedule ", to_string(options.schedule), " got ", options.num_stages, " stages on ",
           options.num_placements, " placements, expected ", number, " on each");
  };
  const int most = schedule.max_stages, least = schedule.min_stages;
  if (most != 0 && chunks > most) {
    reject_stages(most == 1 ? "one" : concat("at most ", most),
                  "interleaved_1f1b for several stages on each placement");
  }
  if (chunks < least) {
    reject_stages(least == 2 ? "two or more" : concat("at least ", least),
                  "1f1b for one stage on each placement");
  }
}

Plan part(const Plan& plan, bool forward) {
  Plan result{plan.options, {}, plan.splits_backward};
  for (const auto& all : plan.actions) {
    std::vector<Action> kept;
    std::copy_if(all.begin(), all.end(), std::back_inserter(kept), [&](const Action& action) {
      const bool is_forward = action.kind == ActionKind::kForward ||
                              action.kind == ActionKind::kSendActivation ||
                              action.kind == ActionKind::kReceiveActivation;
      return is_forward == forward;
    });
    result.actions.push_back(std::move(kept));
  }
  return result;
}

}  // namespace

PlaceInPipeline place_in(const PlanOptions& options, int placement) {
  const int placements = options.num_placements == 0 ? options.num_stages : options.num_placements;
  // The formulas of simulate.h come here without a plan, and divide by these numbers.
  if (placements < 1 || options.num_stages < placements || options.num_micro_batches < 1) {
    throw UsageError(kWherePlan,
                     concat("got ", options.num_stages, " stages on ", placements, " placements and ",
                            options.num_micro_batches, " micro-batches"),
                     "at least one stage on each placement, and one micro-batch");
  }
  return {.placement = placement,
          .num_placements = placements,
          .num_stages = options.num_stages / placements,
          .num_micro_batches = options.num_micro_batches};
}

ActionOrder action_order(const PlanOptions& options, const ScheduleType& schedule, int placement) {
  // chunk_order() makes a turn for each micro-batch of a whole group.
  constexpr int kMaxGroup = 1 << 16;
  const int most = std::max(options.num_micro_batches, kMaxGroup);
  const ActionOrder order = schedule.order(place_in(options, placement));
  if (order.group < 1 || order.group > most || order.warm_up < 0 || order.max_waiting < 0) {
    throw UsageError(
        kWherePlan,
        concat("schedule ", to_string(options.schedule), " has for placement ", placement, " a group of ",
               order.group, ", a warm-up of ", order.warm_up, " and ", order.max_waiting, " that may wait"),
        concat("a group from 1 to ", most, ", and the others from 0 on"));
  }
  return order;
}

std::string to_string(const Action& action) {
  constexpr std::array kNames{"F", "B", "I", "W", "sA", "rA", "sG", "rG"};
  return concat(kNames.at(static_cast<std::size_t>(action.kind)), action.stage, ".", action.micro_batch);
}

const char* name_of(ActionKind kind) {
  constexpr std::array kNames{"forward",          "backward",           "input gradient",
                              "weight gradient",  "sending activation", "receiving activation",
                              "sending gradient", "receiving gradient"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::string Plan::text() const {
  std::string text;
  for (std::size_t placement = 0; placement < actions.size(); ++placement) {
    base::TextList line(" ");
    line.add("placement ", placement, ":");
    for (const Action& action : actions[placement]) line.add(to_string(action));
    text += line.text() + "\n";
  }
  return text;
}

Plan make_plan(const PlanOptions& options) {
  Plan plan{options, {}};
  if (options.num_placements == 0) plan.options.num_placements = options.num_stages;
  const ScheduleType schedule = schedule_type(options.schedule);
  check(plan.options, schedule);
  plan.splits_backward = schedule.splits_backward;
  for (int placement = 0; placement < plan.num_placements(); ++placement) {
    plan.actions.push_back(actions_of(plan, schedule, placement));
  }
  return plan;
}

Plan forward_part(const Plan& plan) {
  return part(plan, true);
}
Plan backward_part(const Plan& plan) {
  return part(plan, false);
}

}  // namespace cohort::pipeline
