// What goes wrong: errors name stage and micro-batch, no thread is left, and the next step runs. What a stage
// that is late leaves behind: timeouts_test.cpp.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/pipeline/internal/placement_run.h"
#include "cohort/pipeline/internal/run.h"
#include "tests/pipeline/nets.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using namespace std::chrono_literals;

PipelineOptions options_of(int count, Schedule schedule = Schedule::kOneFOneB) {
  PipelineOptions options;
  options.placements = placements(count);
  options.split_size = 2;
  options.schedule = schedule;
  options.timeout = 60s;
  return options;
}

// Runs `fault` when it is called for the `at`-th time; before, afterwards and else it hands its input on.
Stage faulty(int at, const std::function<void()>& fault, bool in_backward = false) {
  struct Fault : torch::autograd::Function<Fault> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              std::function<void()> run) {
      context->saved_data["run"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(std::move(run)));
      return x.clone();
    }
    static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
      static_cast<Holder&>(*context->saved_data["run"].toCapsule()).run();
      return {gradients.at(0), at::Tensor()};
    }
    struct Holder : torch::CustomClassHolder {
      explicit Holder(std::function<void()> with) : run(std::move(with)) {}
      std::function<void()> run;
    };
  };
  const auto calls = std::make_shared<std::atomic<int>>(0);
  const auto count = [=] {
    if ((*calls)++ == at) fault();
  };
  return Stage(
             [=](const Tensors& in) {
               if (in_backward) return Tensors{Fault::apply(in.at(0), count)};
               count();
               return Tensors{in.at(0) * 1};
             },
             {})
      .name("faulty");
}

struct Job {
  torch::nn::Linear first{4, 4}, last{4, 2};
  at::Tensor input = torch::randn({8, 4}), target = torch::randn({8, 2});
};

TEST(FaultsTest, AStageThatThrowsIsNamedWithItsMicroBatch) {
  for (const int threads : {2, 3}) {
    for (const bool in_backward : {false, true}) {
      for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB}) {
        Job job;
        const Stage middle = faulty(2, [] { throw DataError("user.code", "no more of it"); }, in_backward);
        std::vector<Stage> stages{job.first, middle};
        if (threads == 3) stages.emplace_back(job.last);
        const at::Tensor target = threads == 3 ? job.target : torch::randn({8, 4});
        Pipeline pipe(stages, options_of(threads, schedule));
        const std::ptrdiff_t before = test::num_threads();
        try {
          pipe.step(job.input, target, mse);
          FAIL() << "threw nothing";
        } catch (const StageError& error) {
          EXPECT_EQ(error.stage(), 1);
          EXPECT_EQ(error.micro_batch(), 2);
          EXPECT_TRUE(cohort::test::message_contains(
              error.what(),
              base::concat("stage 1 (faulty) on cpu:1/a, ", in_backward ? "backward" : "forward",
                           " of micro-batch 2: [user.code] no more of it")));
          COHORT_EXPECT_THROW_WITH(std::rethrow_if_nested(error), DataError, "no more of it");
        }
        // Those of the pipeline before may have been about to end.
        EXPECT_TRUE(cohort::test::comes_true([&] { return test::num_threads() <= before; }));
        zero_grad(pipe.parameters());
        pipe.step(job.input, target, mse);
        EXPECT_TRUE(job.first->weight.grad().defined()) << "the next step runs";
      }
    }
  }
}

TEST(FaultsTest, AStageThatThrowsLetsGoOfThoseThatWaitForTheirTurn) {
  for (const int run_ahead : {0, 1}) {
    Job job;
    PipelineOptions options = options_of(2);
    options.run_ahead = run_ahead;
    Pipeline pipe({job.first, faulty(2, [] { throw DataError("user.code", "no more of it"); })}, options);
    const at::Tensor target = torch::randn({8, 4});
    COHORT_EXPECT_THROW_WITH(pipe.step(job.input, target, mse), StageError,
                             "forward of micro-batch 2: [user.code] no more of it");
    zero_grad(pipe.parameters());
    pipe.step(job.input, target, mse);
    EXPECT_TRUE(job.first->weight.grad().defined()) << "the next step runs";
  }
}

TEST(FaultsTest, ALossThatThrowsIsTheLastStages) {
  Job job;
  Pipeline pipe({job.first, job.last}, options_of(2));
  COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target,
                                     [](const at::Tensor& a, const at::Tensor& b) {
                                       return torch::mse_loss(a, b, at::Reduction::None);
                                     }),
                           StageError,
                           "stage 1 (Linear) on cpu:1/a, forward of micro-batch 0: [pipeline.loss] the loss "
                           "is Float[2, 2], expected one number");
  COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target,
                                     [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
                                       throw std::runtime_error("no loss");
                                     }),
                           StageError, "of micro-batch 0: no loss");
  pipe.step(job.input, job.target, mse);
}

TEST(FaultsTest, AStageThatHangsIsNamedAtTheDeadline) {
  Job job;
  const auto gate = std::make_shared<cohort::test::Gate>();
  PipelineOptions options = options_of(3);
  options.timeout = 1500ms;
  Pipeline pipe({job.first, faulty(1, [=] { gate->wait(); }), job.last}, options);
  pipe.forward(torch::randn({2, 4}));  // threads have computed once
  const std::ptrdiff_t before = test::num_threads();
  COHORT_EXPECT_THROW_WITH(
      pipe.step(job.input, job.target, mse), TimeoutError,
      "waited 1500 ms for a step: stage 1 (faulty) on cpu:1/a is in the forward of micro-batch 0. "
      "Try: wait_for_late_stages(), then zero_grad(), then step()");
  COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target, mse), TimeoutError,
                           "waited 1500 ms for an earlier step: stage 1 (faulty)");
  COHORT_EXPECT_THROW_WITH(pipe.wait_for_late_stages(), TimeoutError,
                           "for an earlier step: stage 1 (faulty)");
  gate->open();
  pipe.wait_for_late_stages();
  zero_grad(pipe.parameters());
  pipe.step(job.input, job.target, mse);
  EXPECT_TRUE(job.first->weight.grad().defined());
  EXPECT_TRUE(cohort::test::comes_true([&] { return test::num_threads() <= before; }))
      << "the thread that hung has ended";
}

TEST(FaultsTest, WaitingForALateStageCountsTowardsTheDeadline) {
  Job job;
  const auto first = std::make_shared<cohort::test::Gate>(), second = std::make_shared<cohort::test::Gate>();
  PipelineOptions options = options_of(3);
  options.timeout = 3000ms;
  Pipeline pipe(
      {job.first, faulty(0, [=] { first->wait(); }), Stage(faulty(0, [=] { second->wait(); })).name("next")},
      options);
  const at::Tensor target = torch::randn({8, 4});
  EXPECT_THROW(pipe.step(job.input, target, mse), TimeoutError);
  std::thread opens([=] {
    std::this_thread::sleep_for(1500ms);
    first->open();
  });
  const auto begin = std::chrono::steady_clock::now();
  {
    const at::NoGradGuard no_grad;  // a step would reject after the wait
    COHORT_EXPECT_THROW_WITH(pipe.forward(job.input), TimeoutError,
                             "waited 3000 ms for a step: stage 2 (next)");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 4300ms)
      << "one timeout, not a second one after 1500 ms";
  opens.join();
  second->open();
  pipe.wait_for_late_stages();
}

TEST(FaultsTest, WhoReceivesIsNamedWhereNoStageComputes) {
  const auto setup = std::make_shared<pipeline::Setup>();
  setup->stages = {torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)};
  setup->first_layers = {0, 1};
  setup->placements = {"rank 0", "rank 1"};
  setup->devices = {c10::kCPU, c10::kCPU};
  pipeline::Run run(setup, std::make_shared<Batch>(*setup, 1), make_plan({Schedule::kFillDrain, 2, 2, 1}), 1s,
                    base::Deadline(60s));
  run.channels[{1, false}] = std::make_unique<ThreadChannel>(1, 0us);
  std::thread receives([&] { run_placement(run, 1); });
  const std::string expected =
      "no stage computes; rank 1 is receiving activation of micro-batch 0, peer: rank 0";
  const base::Deadline deadline(30s);
  while (run.who_computes() != expected && !deadline.expired()) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(run.who_computes(), expected);
  run.time_out();
  receives.join();
  EXPECT_EQ(run.who_computes(), "no stage computes");
}

// The last stage is late, and its loss is a function of the caller's that is gone when the stage comes back.
TEST(FaultsTest, TheLossIsNotCalledAfterItsStepHasThrown) {
  Job job;
  const auto gate = std::make_shared<cohort::test::Gate>();
  PipelineOptions options = options_of(2);
  options.timeout = 1800ms;
  Pipeline pipe({job.first, faulty(1, [=] { gate->wait(); })}, options);
  std::atomic<int> late_calls{0};
  std::atomic<bool> is_over{false};
  const at::Tensor target = torch::randn({8, 4});
  EXPECT_THROW(pipe.step(job.input, target,
                         [&](const at::Tensor& y, const at::Tensor& t) {
                           if (is_over) ++late_calls;
                           return mse(y, t);
                         }),
               TimeoutError);
  is_over = true;
  gate->open();
  pipe.wait_for_late_stages();
  zero_grad(pipe.parameters());
  pipe.step(job.input, target, mse);
  EXPECT_EQ(late_calls, 0);
}

TEST(FaultsTest, WrongShapesBetweenStagesNameBoth) {
  torch::nn::Linear first(4, 5), last(4, 2);
  Pipeline pipe({first, last}, options_of(2));
  COHORT_EXPECT_THROW_WITH(pipe.step(torch::randn({4, 4}), torch::randn({4, 2}), mse), StageError,
                           "stage 1 (Linear) on cpu:1/a, forward of micro-batch 0: ");
  COHORT_EXPECT_THROW_WITH(pipe.step(torch::randn({4, 4}), torch::randn({4, 2}), mse), StageError,
                           "(its inputs, of stage 0: Float[2, 5])");
  COHORT_EXPECT_THROW_WITH(pipe.step(torch::randn({4, 3}), torch::randn({4, 2}), mse), StageError,
                           "stage 0 (Linear)");
}

TEST(FaultsTest, ALossThatIsNoNumberIsRejectedWithoutTheInputsOfItsStage) {
  Job job;
  Pipeline pipe({job.first, job.last}, options_of(2));
  const auto by_sample = [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square().sum(1); };
  try {
    pipe.step(job.input, job.target, by_sample);
    FAIL() << "threw nothing";
  } catch (const StageError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("the loss is Float[2], expected one number"), std::string::npos) << message;
    EXPECT_TRUE(message.ends_with("Try: the mean over the samples of a micro-batch")) << message;
  }
}

TEST(FaultsTest, PlacementsThatAreNotThereOrStandTwiceAreNamed) {
  Job job;
  PipelineOptions options = options_of(2);
  COHORT_EXPECT_THROW_WITH(base::parse_placements("cpu:0,cpu:4711"), ConfigError,
                           "placement \"cpu:4711\": core 4711 is asked for");
  options.placements = base::parse_placements("cpu:0,cpu:0");
  COHORT_EXPECT_THROW_WITH(Pipeline({job.first, job.last}, options), UsageError,
                           "placement cpu:0 stands twice, for one thread. Try: cpu:0/a and cpu:0/b");
}

TEST(FaultsTest, OptionsThatDoNotGoTogetherAreRejected) {
  Job job;
  const std::vector<Stage> stages{job.first, job.last};
  PipelineOptions options = options_of(2);
  COHORT_EXPECT_THROW_WITH(Pipeline(std::vector<Stage>(), options), UsageError, "got no stages");
  options.num_micro_batches = 4;
  COHORT_EXPECT_THROW_WITH(Pipeline(stages, options), UsageError,
                           "got num_micro_batches = 4 and split_size = 2, expected one of them above 0");
  options = options_of(2, Schedule::kZeroBubble);
  COHORT_EXPECT_THROW_WITH(Pipeline({job.first, Stage(job.last).recompute()}, options), UsageError,
                           "stage 1 (Linear) is recomputed, so zb_h1 cannot split its backward into "
                           "input and weight gradients. Try: schedule 1f1b with recomputation");
  options = options_of(3);
  COHORT_EXPECT_THROW_WITH(Pipeline(stages, options), UsageError, "got 2 stages on 3 placements");
  options = options_of(2);
  options.run_ahead = 2;
  COHORT_EXPECT_THROW_WITH(Pipeline(stages, options), UsageError,
                           "got run_ahead = 2, expected one of 2 placements of one process");
  options = options_of(2);
  options.skips = {{.from = 0, .output = 1, .to = 1}};
  COHORT_EXPECT_THROW_WITH(
      Pipeline(stages, options), UsageError,
      "got a skip of output 1 from stage 0 to stage 1, expected one that passes a stage, of 2");
  options = options_of(3);
  options.skips = {{.from = 0, .output = 1, .to = 2}};
  Pipeline missing({job.first, torch::nn::Linear(4, 4), job.last}, options);
  COHORT_EXPECT_THROW_WITH(missing.step(job.input, job.target, mse), StageError,
                           "[pipeline.skip] output 1 is to go to stage 2, but the stage returned 1 tensors");
}

TEST(FaultsTest, BatchesThatCannotBeCutAreRejected) {
  Job job;
  Pipeline pipe({job.first, job.last}, options_of(2));
  COHORT_EXPECT_THROW_WITH(pipe.step(job.input, torch::randn({7, 2}), mse), UsageError,
                           "target 0 has 7 samples, expected 8 as input 0");
  COHORT_EXPECT_THROW_WITH(pipe.step(torch::tensor(1.0), job.target, mse), UsageError,
                           "input 0 has no dimension");
  COHORT_EXPECT_THROW_WITH(pipe.step(torch::empty({0, 4}), torch::empty({0, 2}), mse), UsageError,
                           "got a batch of 0 samples");
  const torch::InferenceMode inference;
  COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target, mse), UsageError, "inference mode");
}

TEST(FaultsTest, GraphsThatCannotGoBackAreRejected) {
  Job job;
  Pipeline pipe({job.first, job.last}, options_of(2));
  const at::Tensor input = job.input.clone().requires_grad_();
  COHORT_EXPECT_THROW_WITH(torch::autograd::grad({pipe.forward(input).sum()}, {input}), UsageError,
                           "torch::autograd::grad(), or backward() with `inputs`, goes through a pipeline");
  COHORT_EXPECT_THROW_WITH(pipe.forward(input).sum().backward({}, true, true), UsageError, "create_graph");
  const at::Tensor twice = pipe.forward(input).sum();
  twice.backward({}, true);
  COHORT_EXPECT_THROW_WITH(twice.backward(), UsageError, "twice");
}

TEST(FaultsTest, AFaultInBackwardOfAModuleComesOutOfBackward) {
  Job job;
  Pipeline pipe(
      {job.first, faulty(1, [] { throw std::runtime_error("broken"); }, true), job.last}, options_of(3));
  const at::Tensor loss = pipe.forward(job.input).sum();
  COHORT_EXPECT_THROW_WITH(loss.backward(), StageError,
                           "stage 1 (faulty) on cpu:1/a, backward of micro-batch 1: broken");
  pipe.forward(job.input).sum().backward();
}

// The loss has a parameter of its own, to which a backward that came too late adds. The pipeline knows
// nothing of it, so it rejects the next step once, whatever gradients there are.
TEST(FaultsTest, WhatALateBackwardAddsToTheLossesOwnParameterIsNotTakenForTheNextSteps) {
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    for (const bool waits : {false, true}) {
      SCOPED_TRACE(base::concat(to_string(schedule), waits ? ", waits" : ""));
      Job job;
      const at::Tensor scale = torch::ones({1}).requires_grad_();
      const auto gate = std::make_shared<cohort::test::Gate>();
      const auto is_stuck = std::make_shared<std::atomic<bool>>(false);
      scale.register_hook([=](const at::Tensor& gradient) {
        if (is_stuck->exchange(false)) gate->wait();
        return gradient;
      });
      PipelineOptions options = options_of(2, schedule);
      options.timeout = 1500ms;
      Pipeline pipe({job.first, job.last}, options);
      const auto loss = [scale](const at::Tensor& output, const at::Tensor& target) {
        return (output * scale - target).square().mean();
      };
      const auto zero = [&] {
        zero_grad(pipe.parameters());
        scale.mutable_grad().reset();
      };
      pipe.step(job.input, job.target, loss);
      const at::Tensor expected = scale.grad().clone();
      zero();
      *is_stuck = true;
      COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target, loss), TimeoutError, "for a step");
      if (waits) {
        gate->open();
        pipe.wait_for_late_stages();
        zero();
      } else {
        zero();
        gate->open();
        COHORT_EXPECT_THROW_WITH(pipe.step(job.input, job.target, loss), UsageError,
                                 "may have added to gradients after it threw. Try: zero_grad()");
        zero();
      }
      pipe.step(job.input, job.target, loss);
      EXPECT_TRUE(at::equal(scale.grad(), expected));
    }
  }
}

// Two pipelines share a placement, whose thread is left behind with one of them: the other's step fails, and
// ends on its other placements too.
TEST(FaultsTest, APlacementThatIsReplacedUnderAStepEndsThatStep) {
  const auto gate = std::make_shared<cohort::test::Gate>(), slow = std::make_shared<cohort::test::Gate>();
  const auto is_over = std::make_shared<std::atomic<bool>>(false);
  const auto mse = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  torch::nn::Linear linear(4, 4), other(4, 4);
  const Stage begins(
      [=](const Tensors& in) {
        slow->wait();
        *is_over = true;
        return Tensors{in[0] * 1};
      },
      {});
  const auto has_begun = std::make_shared<std::atomic<bool>>(false);
  const Stage hangs(
      [=](const Tensors& in) {
        *has_begun = true;
        gate->wait();
        return Tensors{in[0] * 1};
      },
      {});
  const auto options = [](const char* placements, std::chrono::milliseconds timeout) {
    PipelineOptions of;
    of.placements = base::parse_placements(placements);
    of.num_micro_batches = 1;
    of.timeout = timeout;
    return of;
  };
  Pipeline a({begins, linear}, options("cpu:0/a,cpu:0/b", 5s));  // it waits for stage 0 until then
  Pipeline b({hangs}, options("cpu:0/b", 1500ms));
  Pipeline c({other}, options("cpu:0/b", 30s));
  const at::Tensor x = torch::randn({8, 4}), y = torch::randn({8, 4});
  std::thread with_b([&] { COHORT_EXPECT_THROW_WITH(b.step(x, y, mse), TimeoutError, "for a step"); });
  while (!*has_begun) std::this_thread::yield();
  std::atomic<bool> has_failed{false};
  std::thread with_a([&] {
    EXPECT_ANY_THROW(a.step(x, y, mse));
    has_failed = true;
    EXPECT_FALSE(*is_over) << "stage 0 still runs";
    slow->open();
    a.wait_for_late_stages();
    EXPECT_TRUE(*is_over) << "what the step has begun is waited for";
  });
  with_b.join();
  c.step(x, y, mse);  // takes a new thread for the placement
  with_a.join();
  EXPECT_TRUE(has_failed);
  gate->open();
}

}  // namespace
}  // namespace cohort::pipeline
