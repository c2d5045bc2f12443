#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cohort/base/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/gate.h"

/// A pipeline that can be held at any place of any of its actions.
namespace cohort::pipeline::test {

/// Where within an action a stage can be held: code of the caller's that runs there.
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

/// Holds whoever comes to one place, until that is opened.
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

/// Hands a tensor on; its backward comes to a place.
struct Passing : torch::autograd::Function<Passing> {
  struct Visit : torch::CustomClassHolder {
    explicit Visit(std::function<void()> with) : go(std::move(with)) {}
    std::function<void()> go;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::function<void()> go) {
    context->saved_data["visit"] = c10::IValue::make_capsule(c10::make_intrusive<Visit>(std::move(go)));
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    static_cast<Visit&>(*context->saved_data["visit"].toCapsule()).go();
    return {gradients.at(0), at::Tensor()};
  }
};

/// How a pipeline is used.
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

inline std::vector<Place> Program::places() const {
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

/// Every schedule that there is, with the first numbers of stages and placements that go together; and what
/// forward() does.
inline std::vector<Program> programs() {
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
  for (const std::string& name : schedule_names()) add(parse_schedule(name));
  all.push_back({Schedule::kOneFOneB, Use::kEvaluation, 3, 3});
  all.push_back({Schedule::kOneFOneB, Use::kModule, 3, 3});
  return all;
}

/// A model that draws, has buffers and hooks, and comes to all places.
class Job {
 public:
  Job(const Program& program, std::optional<Place> held, std::chrono::milliseconds timeout)
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

  // What a step gave: its result, gradients, and the next random number; and the buffers after them.
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

}  // namespace cohort::pipeline::test
