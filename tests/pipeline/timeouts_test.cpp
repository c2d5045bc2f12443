// A stage is held at an action until its step has timed out, at every action of every schedule. The next step
// has the bits of a step without that one.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "cohort/core/deadline.h"
#include "cohort/core/error.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/balance.h"
#include "tests/pipeline/nets.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using namespace std::chrono_literals;
using std::chrono::milliseconds;
using torch::autograd::AutogradContext;

// Where within an action a stage can be held: code of the caller's that runs there.
enum class Point {
  kBegin,     // of a forward, before it has done anything
  kComputed,  // within it, when it has drawn numbers and written to buffers
  kLoss,
  kFirstNode,  // of a backward
  kLastNode,
  kHook,  // of a parameter, right before its gradient is added
  kEnd,   // of any action: on_action
};

struct Place {
  Action action;
  Point point;
};

// Holds whoever comes to one place, until that is opened.
class Holder {
 public:
  explicit Holder(std::optional<Place> at) : at_(at) {}
  void pass(const Action& action, Point point) {
    if (!at_ || point != at_->point || !(action == at_->action) || passed_.exchange(true)) return;
    gate_.wait();
  }
  bool was_reached() const { return passed_; }
  void open() { gate_.open(); }

 private:
  const std::optional<Place> at_;
  std::atomic<bool> passed_{false};
  cohort::test::Gate gate_;
};

// Hands a tensor on; its backward comes to a place.
struct Passing : torch::autograd::Function<Passing> {
  struct Visit : torch::CustomClassHolder {
    explicit Visit(std::function<void()> with) : go(std::move(with)) {}
    std::function<void()> go;
  };
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::function<void()> go) {
    context->saved_data["visit"] = c10::IValue::make_capsule(c10::make_intrusive<Visit>(std::move(go)));
    return x.clone();
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    static_cast<Visit&>(*context->saved_data["visit"].toCapsule()).go();
    return {gradients.at(0), at::Tensor()};
  }
};

// How a pipeline is used.
enum class Use { kStep, kEvaluation, kModule };

struct Program {
  Schedule schedule;
  Use use;
  int num_stages, num_placements;

  Plan plan() const {
    const bool is_step = use == Use::kStep;
    Plan all = make_plan({is_step ? schedule : Schedule::kFillDrain, num_stages, num_placements, 3});
    return use == Use::kEvaluation ? forward_part(all) : all;
  }
  ActionKind input_gradient() const {
    return use == Use::kStep && schedule == Schedule::kZeroBubble ? ActionKind::kInputGradient
                                                                  : ActionKind::kBackward;
  }
  ActionKind weight_gradient() const {
    return input_gradient() == ActionKind::kBackward ? ActionKind::kBackward : ActionKind::kWeightGradient;
  }
  std::vector<Place> places() const;
};

std::vector<Place> Program::places() const {
  std::vector<Place> result;
  const Plan all = plan();
  for (const auto& actions : all.actions) {
    for (const Action& action : actions) {
      if (!action.computes()) continue;  // the others wait for one that computes
      std::vector<Point> points{Point::kEnd};
      if (action.kind == ActionKind::kForward) {
        points.insert(points.end(), {Point::kBegin, Point::kComputed});
        if (use == Use::kStep && action.stage + 1 == num_stages) points.push_back(Point::kLoss);
      }
      if (action.kind == input_gradient()) points.insert(points.end(), {Point::kFirstNode, Point::kLastNode});
      if (action.kind == weight_gradient()) points.push_back(Point::kHook);
      for (const Point point : points) result.push_back({action, point});
    }
  }
  return result;
}

// Every schedule that there is, with the first numbers of stages and placements that go together; and what
// forward() does.
std::vector<Program> programs() {
  std::vector<Program> all;
  const auto add = [&](Schedule schedule) {
    for (const int stages : {3, 4}) {
      const int on = stages == 3 ? 3 : 2;
      try {
        make_plan({schedule, stages, on, 3});
      } catch (const UsageError&) {
        continue;
      }
      all.push_back({schedule, Use::kStep, stages, on});
      return;
    }
    ADD_FAILURE() << "no numbers of stages and placements for " << to_string(schedule);
  };
  try {
    for (int i = 0;; ++i) {
      to_string(static_cast<Schedule>(i));
      add(static_cast<Schedule>(i));
    }
  } catch (const std::out_of_range&) {  // there are no more
  }
  all.push_back({Schedule::kOneFOneB, Use::kEvaluation, 3, 3});
  all.push_back({Schedule::kOneFOneB, Use::kModule, 3, 3});
  return all;
}

// A model that draws, has buffers and hooks, and comes to all places.
class Job {
 public:
  Job(const Program& program, std::optional<Place> held, milliseconds timeout)
      : program_(program), holder(std::make_shared<Holder>(held)) {
    torch::manual_seed(3);
    input = torch::randn({8, 4}).requires_grad_();
    target = torch::randn({8, 4});
    std::vector<Stage> stages;
    for (int i = 0; i < program.num_stages; ++i) stages.push_back(stage(i));
    PipelineOptions options;
    options.placements = placements(program.num_placements);
    options.num_micro_batches = 3;
    options.schedule = program.schedule;
    options.timeout = timeout;
    options.on_action = [holder = holder](const Action& action) { holder->pass(action, Point::kEnd); };
    pipe.emplace(std::move(stages), options);
    for (const at::Tensor& buffer : buffers) buffers_before_.push_back(buffer.clone());
  }

  // As before the first step.
  void restore() {
    zero_grad(pipe->parameters());
    input.mutable_grad().reset();
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(buffers_before_[i]);
    torch::manual_seed(4);
  }

  at::Tensor step() {
    if (program_.use == Use::kStep) {
      const auto count = std::make_shared<int>(0);
      return pipe->step(input, target,
                        [count, holder = holder, last = program_.num_stages - 1](const at::Tensor& output,
                                                                                 const at::Tensor& wanted) {
                          holder->pass({ActionKind::kForward, last, (*count)++}, Point::kLoss);
                          return mse(at::dropout(output, 0.2, true), wanted);
                        });
    }
    const at::AutoGradMode mode(program_.use == Use::kModule);
    const at::Tensor output = pipe->forward(input);
    if (program_.use == Use::kModule) mse(output, target).backward();
    return output.detach();
  }

  // What a step gave: its result, gradients, and the next random number; and the buffers behind them.
  Tensors results(const at::Tensor& result) const {
    Tensors all{result, input.grad(), torch::rand({2})};
    for (const at::Tensor& parameter : pipe->parameters()) {
      all.push_back(parameter.detach());
      all.push_back(parameter.grad());
    }
    return all;
  }

 private:
  Stage stage(int number) {
    torch::nn::Linear linear(4, 4);
    torch::nn::BatchNorm1d norm(4);
    const auto forwards = std::make_shared<std::atomic<int>>(0),
               hooks = std::make_shared<std::atomic<int>>(0);
    linear->weight.register_hook(
        [hooks, number, holder = holder, kind = program_.weight_gradient()](const at::Tensor& gradient) {
          holder->pass({kind, number, (*hooks)++}, Point::kHook);
          return gradient * 2;
        });
    Tensors parameters = linear->parameters();
    for (const at::Tensor& parameter : norm->parameters()) parameters.push_back(parameter);
    for (const at::Tensor& buffer : norm->buffers()) buffers.push_back(buffer);
    const auto run = [=, holder = holder, kind = program_.input_gradient()](const Tensors& in) mutable {
      const int m = (*forwards)++;
      const auto visit = [=](Point point) {
        return std::function<void()>([=] { holder->pass({kind, number, m}, point); });
      };
      holder->pass({ActionKind::kForward, number, m}, Point::kBegin);
      at::Tensor x = Passing::apply(in.at(0), visit(Point::kLastNode));
      x = at::dropout(norm->forward(linear->forward(x)), 0.3, true);
      holder->pass({ActionKind::kForward, number, m}, Point::kComputed);
      return Tensors{Passing::apply(x, visit(Point::kFirstNode))};
    };
    return Stage(run, parameters, norm->buffers()).name("held");
  }

  Program program_;
  Tensors buffers_before_;

 public:
  std::shared_ptr<Holder> holder;
  std::optional<Pipeline> pipe;
  at::Tensor input, target;
  Tensors buffers;
};

// Who opens the place, and when the caller begins anew.
enum class Then {
  kWaits,  // the caller waits for late stages, and then puts everything back
  kGoesOn  // the caller makes the next step, which waits, and puts everything back if that refuses
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
      core::concat("is in the ", name_of(place.action.kind), " of micro-batch ", place.action.micro_batch);
  EXPECT_TRUE(
      cohort::test::message_contains(message, core::concat("waited ", timeout.count(), " ms for a step")));
  EXPECT_TRUE(
      cohort::test::message_contains(message, core::concat("stage ", place.action.stage, " (held) on ")));
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
      EXPECT_EQ(then, Then::kGoesOn);
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

struct Case {
  std::size_t program;
  Place place;
  Then then;
};

std::vector<Case> all_cases(const std::vector<Program>& programs) {
  std::vector<Case> all;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    for (const Place& place : programs[i].places()) {
      for (const Then then : {Then::kWaits, Then::kGoesOn}) all.push_back({i, place, then});
    }
  }
  return all;
}

// Each kind of place once, in any program and stage, for either caller.
std::vector<Case> some_of(std::vector<Case> cases) {
  std::shuffle(cases.begin(), cases.end(), std::mt19937(1));
  std::set<std::tuple<ActionKind, Point, Then>> seen;
  std::erase_if(cases, [&](const Case& each) {
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
  std::vector<Case> cases = all_cases(all);
  if (std::getenv("COHORT_HOLD_EVERYWHERE") == nullptr) cases = some_of(std::move(cases));
  for (const Case& each : cases) {
    const Program& program = all[each.program];
    SCOPED_TRACE(core::concat(to_string(program.schedule), ", use ", static_cast<int>(program.use), ", ",
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

constexpr milliseconds kTimeout = 1s;

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

TEST(TimeoutsTest, SparseGradientsOfALateStageAreRefusedUntilTheyAreZero) {
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
  pipe.step(input, target, mse);
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
  const auto first = parallel::PlacementWorker::of(core::Placement::parse("cpu:0"));
  const Pipeline other({torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)}, two_placements());
  for (const std::function<void()>& call : {std::function<void()>(profiles), std::function<void()>(tunes)}) {
    sleeps = true;
    has_ended = false;
    EXPECT_THROW(call(), TimeoutError);
    EXPECT_TRUE(has_ended) << "gradients were put back before";
    const core::Deadline deadline(10s);
    while (!has_ended && !deadline.expired()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(last->weight.grad().defined());
  }
}

}  // namespace
}  // namespace cohort::pipeline
