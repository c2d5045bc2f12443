// The simulation lets each placement continue until it must wait, round by round, until nobody moves. What is
// unfinished then is a deadlock. The clock of a placement moves to when what it receives, or a free place,
// was ready. So the order in which placements are looked at does not change the result. serialized_order()
// works on demand instead: before an action, the rest of the placements do what it waits for.
#include "cohort/pipeline/simulate.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::pipeline {
namespace {

using base::concat;
constexpr const char* kWhereSimulate = "pipeline.simulate";

// What is on the way from one stage to a neighbour.
struct Channel {
  struct Item {
    int micro_batch;
    double ready;
  };
  std::deque<Item> items;
  std::deque<double> taken;  // when places became free, newest last
};

class Clockwork {
 public:
  Clockwork(const Plan& plan, const SimulateOptions& options)
      : plan_(plan),
        options_(options),
        next_(plan.actions.size()),
        now_(plan.actions.size()),
        memory_(plan.actions.size()) {
    result_.actions.resize(plan.actions.size());
    result_.peak_memory.resize(plan.actions.size());
    for (const Action& action : plan.actions.front()) {
      has_forwards_ = has_forwards_ || action.kind == ActionKind::kForward;
    }
  }

  Simulation run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t placement = 0; placement < next_.size(); ++placement) {
        // As far as it gets: its clock is its own, so the others' order does not matter.
        while (step(placement)) moved = true;
      }
    }
    check_end();
    double busy = 0;
    for (const auto& actions : result_.actions) {
      for (const TimedAction& timed : actions) {
        busy += timed.end - timed.begin;
        // Busy time is that of actions: sends cost the receiver a wait, and nobody work.
        result_.time = std::max(result_.time, timed.end);
      }
    }
    const double whole = result_.time * static_cast<double>(plan_.actions.size());
    result_.bubble = whole > 0 ? 1 - busy / whole : 0;
    return std::move(result_);
  }

 private:
  using Key = std::pair<int, bool>;  // the stage that receives; a gradient

  // One entry serves for all stages.
  StageCosts costs(int stage) const {
    const auto& given = options_.costs;
    return given.empty() ? StageCosts() : given[given.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }

  // Does the placement's next action, if what it waits for is there.
  bool step(std::size_t placement) {
    const auto& actions = plan_.actions[placement];
    if (next_[placement] == actions.size()) return false;
    const Action& action = actions[next_[placement]];
    switch (action.kind) {
      case ActionKind::kSendActivation:
        if (!send(placement, {action.stage + 1, false}, action)) return false;
        break;
      case ActionKind::kSendGradient:
        if (!send(placement, {action.stage - 1, true}, action)) return false;
        break;
      case ActionKind::kReceiveActivation:
        if (!receive(placement, {action.stage, false}, action)) return false;
        break;
      case ActionKind::kReceiveGradient:
        if (!receive(placement, {action.stage, true}, action)) return false;
        break;
      default:
        compute(placement, action);
    }
    ++next_[placement];
    return true;
  }

  bool send(std::size_t placement, Key key, const Action& action) {
    Channel& channel = channels_[key];
    const auto capacity = static_cast<std::size_t>(options_.channel_capacity);
    if (capacity > 0) {
      // Full: the placement stands still until the next stage takes one.
      if (channel.items.size() >= capacity) return false;
      // The place that this one takes became free when an earlier one was taken.
      if (sent_[key] >= options_.channel_capacity) {
        const auto freed = static_cast<std::size_t>(sent_[key] - options_.channel_capacity);
        now_[placement] = std::max(now_[placement], channel.taken[freed]);
      }
    }
    ++sent_[key];
    channel.items.push_back({action.micro_batch, now_[placement] + costs(action.stage).send});
    return true;
  }

  bool receive(std::size_t placement, Key key, const Action& action) {
    Channel& channel = channels_[key];
    if (channel.items.empty()) return false;
    const Channel::Item item = channel.items.front();
    if (item.micro_batch != action.micro_batch) {
      throw UsageError(kWhereSimulate, concat(to_string(action), " on placement ", placement,
                                              " got micro-batch ", item.micro_batch));
    }
    // A place becomes free when its item is taken, which may be long after it was ready.
    channel.items.pop_front();
    now_[placement] = std::max(now_[placement], item.ready);
    waits_.push_back({key, item.ready, now_[placement]});
    channel.taken.push_back(now_[placement]);
    return true;
  }

  void compute(std::size_t placement, const Action& action) {
    check_order(placement, action);
    const StageCosts cost = costs(action.stage);
    // A forward's activations live until its backward. Of a split backward, the weights' part lives longer.
    double& memory = memory_[placement];
    double time = 0;
    switch (action.kind) {
      case ActionKind::kForward:
        time = cost.forward;
        memory += cost.activation;
        result_.peak_memory[placement] = std::max(result_.peak_memory[placement], memory);
        break;
      case ActionKind::kBackward:
        time = cost.input_gradient + cost.weight_gradient;
        memory -= cost.activation;
        break;
      case ActionKind::kInputGradient:
        time = cost.input_gradient;
        memory -= cost.activation - cost.weight_part;
        break;
      default:
        time = cost.weight_gradient;
        memory -= cost.weight_part;
    }
    result_.actions[placement].push_back({action, now_[placement], now_[placement] + time});
    now_[placement] += time;
  }

  // Each stage computes each micro-batch once, in order, and after what it needs.
  void check_order(std::size_t placement, const Action& action) {
    const auto expect = [&](bool right, const char* what) {
      if (!right)
        throw UsageError(kWhereSimulate, concat(to_string(action), " on placement ", placement, ": ", what));
    };
    expect(plan_.placement_of(action.stage) == static_cast<int>(placement),
           "the stage is on another placement");
    int& done = done_[{action.stage, action.kind}];
    expect(action.micro_batch == done, "not in the order of the micro-batches");
    ++done;
    const auto count = [&](int stage, ActionKind kind) { return done_[std::make_pair(stage, kind)]; };
    const auto backwards = [&](int stage) {
      return std::max(count(stage, ActionKind::kBackward), count(stage, ActionKind::kInputGradient));
    };
    // In a plan's backward part the forwards belong to an earlier run, so none is asked for.
    const int stage = action.stage, m = action.micro_batch;
    if (action.kind == ActionKind::kForward) {
      expect(stage == 0 || count(stage - 1, ActionKind::kForward) > m,
             "before the forward of the stage before");
    } else if (action.kind == ActionKind::kWeightGradient) {
      expect(count(stage, ActionKind::kInputGradient) > m, "before its input gradient");
    } else if (has_forwards_) {
      expect(count(stage, ActionKind::kForward) > m, "before its forward");
    }
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGradient) {
      expect(stage + 1 == plan_.num_stages() || backwards(stage + 1) > m,
             "before the backward of the stage after");
    }
  }

  void check_end() {
    base::TextList waiting;
    for (std::size_t placement = 0; placement < next_.size(); ++placement) {
      if (next_[placement] == plan_.actions[placement].size()) continue;
      waiting.add("placement ", placement, " at ", to_string(plan_.actions[placement][next_[placement]]));
    }
    if (!waiting.empty()) {
      throw UsageError(kWhereSimulate,
                       concat("deadlock: ", waiting.text(), " wait for ever with room for ",
                              options_.channel_capacity, " between two stages"),
                       "more room, or another order");
    }
    for (const auto& [key, channel] : channels_) {
      if (!channel.items.empty()) {
        throw UsageError(kWhereSimulate, concat("stage ", key.first, " never receives micro-batch ",
                                                channel.items.front().micro_batch));
      }
    }
    for (const auto& [key, count] : done_) {
      if (count == 0 || count == plan_.num_micro_batches()) continue;
      throw UsageError(kWhereSimulate, concat("stage ", key.first, " does the ", name_of(key.second), " of ",
                                              count, " micro-batches, expected ", plan_.num_micro_batches()));
    }
    count_queued();
  }

  // What waits between two stages is what was sent at that time and is not received yet.
  void count_queued() {
    std::map<Key, std::vector<std::pair<double, int>>> changes;
    for (const auto& [key, sent, received] : waits_) {
      if (received <= sent) continue;  // handed over at once
      changes[key].push_back({sent, 1});
      changes[key].push_back({received, -1});
    }
    result_.max_queued = waits_.empty() ? 0 : 1;
    for (auto& [key, list] : changes) {
      std::sort(list.begin(), list.end());  // at equal times a place is taken after another is freed
      int queued = 0;
      for (const auto& change : list)
        result_.max_queued = std::max(result_.max_queued, queued += change.second);
    }
  }

  struct Wait {
    Key key;
    double sent, received;
  };
  const Plan& plan_;
  const SimulateOptions& options_;
  std::vector<std::size_t> next_;
  std::vector<double> now_, memory_;
  std::map<Key, Channel> channels_;
  std::map<Key, int> sent_;
  std::vector<Wait> waits_;
  std::map<std::pair<int, ActionKind>, int> done_;
  bool has_forwards_ = false;  // else it is the part of a plan that goes back
  Simulation result_;
};

// Every placement's list of actions, done as far as somebody waits for it.
class OnDemand {
 public:
  OnDemand(const Plan& plan, int capacity) : plan_(plan), capacity_(capacity), next_(plan.actions.size()) {}

  std::vector<int> run(int run_ahead) {
    // This placement first, with all that it needs of others; then what is left, in order.
    finish(run_ahead);
    for (int placement = 0; placement < plan_.num_placements(); ++placement) finish(placement);
    return std::move(order_);
  }

 private:
  struct Counts {
    int sent = 0, received = 0;
  };

  void finish(int placement) {
    const auto index = static_cast<std::size_t>(placement);
    while (next_[index] < plan_.actions[index].size()) step(placement);
  }

  // Does the placement's next action, and before that what others must do for it.
  void step(int placement) {
    std::size_t& next = next_[static_cast<std::size_t>(placement)];
    const Action& action = plan_.actions[static_cast<std::size_t>(placement)].at(next);
    switch (action.kind) {
      case ActionKind::kSendActivation:
        send(action.stage + 1, false);
        break;
      case ActionKind::kSendGradient:
        send(action.stage - 1, true);
        break;
      case ActionKind::kReceiveActivation:
        receive(action.stage, false, action.stage - 1);
        break;
      case ActionKind::kReceiveGradient:
        receive(action.stage, true, action.stage + 1);
        break;
      default:
        order_.push_back(placement);
    }
    ++next;
  }

  void send(int to, bool gradient) {
    Counts& counts = counts_[{to, gradient}];
    while (capacity_ > 0 && counts.sent - counts.received >= capacity_) step(plan_.placement_of(to));
    ++counts.sent;
  }
  void receive(int at, bool gradient, int from) {
    Counts& counts = counts_[{at, gradient}];
    // The sender continues until it has sent. A plan without a deadlock has no circle here.
    while (counts.received == counts.sent) step(plan_.placement_of(from));
    ++counts.received;
  }

  const Plan& plan_;
  const int capacity_;
  std::vector<std::size_t> next_;
  std::map<std::pair<int, bool>, Counts> counts_;  // by the stage that receives, and whether a gradient
  std::vector<int> order_;
};

}  // namespace

Simulation simulate(const Plan& plan, const SimulateOptions& options) {
  const auto given = options.costs.size();
  if (given > 1 && given != static_cast<std::size_t>(plan.num_stages())) {
    throw UsageError(kWhereSimulate,
                     concat("got costs of ", given, " stages, expected 1 or ", plan.num_stages()));
  }
  return Clockwork(plan, options).run();
}

int channel_capacity(const Plan& plan) {
  return std::max(1, simulate(plan).max_queued);
}

std::vector<int> serialized_order(const Plan& plan, int run_ahead, int channel_capacity) {
  return OnDemand(plan, channel_capacity).run(run_ahead);
}

double bubble_formula(const PlanOptions& options, const StageCosts& costs) {
  const ScheduleType schedule = schedule_type(options.schedule);
  if (!schedule.idle_time) {
    throw UsageError(kWhereSimulate,
                     base::concat("there is no formula for schedule ", to_string(options.schedule)),
                     "simulate(), which needs none");
  }
  const PlaceInPipeline place = place_in(options, 0);
  const double idle = schedule.idle_time(place, costs);
  const double step = (costs.forward + costs.input_gradient + costs.weight_gradient) * place.num_stages;
  return idle / (idle + options.num_micro_batches * step);
}

double memory_formula(const PlanOptions& options, int placement, const StageCosts& costs) {
  return memory_formula(options, schedule_type(options.schedule), placement, costs);
}

// A placement holds the micro-batches of its warm-up and one more, and the weight gradients that may wait.
double memory_formula(const PlanOptions& options, const ScheduleType& schedule, int placement,
                      const StageCosts& costs) {
  const PlaceInPipeline place = place_in(options, placement);
  const ActionOrder order = action_order(options, schedule, placement);
  const int all = place.num_micro_batches * place.num_stages;
  const int whole = order.warm_up >= all ? all : order.warm_up + 1;  // a warm-up may be INT_MAX
  const int waiting = schedule.splits_backward ? std::min(all - whole, order.max_waiting) : 0;
  return whole * costs.activation + waiting * costs.weight_part;
}

}  // namespace cohort::pipeline
