// Stages on the ranks of a group.
#include "tests/support/ranks.h"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/pipeline/internal/group_channel.h"
#include "tests/pipeline/nets.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

struct Result {
  at::Tensor loss;
  Tensors gradients;
};

struct RanksCase {
  Schedule schedule;
  std::vector<std::size_t> cuts;
};

PipelineOptions two(Schedule schedule) {
  PipelineOptions options;
  options.placements = placements(2);
  options.split_size = 3;
  options.schedule = schedule;
  options.timeout = std::chrono::seconds(20);
  return options;
}

TEST(RanksTest, TwoRanksHaveTheBitsOfTwoThreads) {
  const at::Tensor input = torch::randn({11, 10}), target = torch::randn({11, 5});
  const std::vector<RanksCase> cases{{Schedule::kFillDrain, {3}},
                                     {Schedule::kOneFOneB, {4}},
                                     {Schedule::kInterleaved, {2, 4, 6}},
                                     {Schedule::kZeroBubble, {3}}};
  for (const char* backend : {"gloo", "shm"}) {
    for (const RanksCase& each : cases) {
      SCOPED_TRACE(base::concat(backend, ", ", to_string(each.schedule)));
      auto whole = mlp();
      Pipeline threads(cut(whole, each.cuts), two(each.schedule));
      const at::Tensor loss = threads.step(input, target, mse);
      const Tensors expected = take_gradients(whole->parameters());

      std::vector<torch::nn::Sequential> models{mlp(), mlp()};
      cohort::test::run_ranks(2, backend, [&](comm::Group& group) {
        auto stages = cut(models[static_cast<std::size_t>(group.rank())], each.cuts);
        for (std::size_t i = 0; i < stages.size(); ++i) {
          if (static_cast<int>(i) % 2 != group.rank()) stages[i] = Stage::remote();
        }
        PipelineOptions options = two(each.schedule);
        options.group = group;
        Pipeline pipe(stages, options);
        for (int step = 0; step < 3; ++step) {
          zero_grad(models[static_cast<std::size_t>(group.rank())]->parameters());
          EXPECT_TRUE(at::equal(pipe.step(input, target, mse), loss)) << "rank " << group.rank();
        }
      });
      std::size_t found = 0;
      for (const auto& model : models) {
        const Tensors got = take_gradients(model->parameters());
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (!got[i].defined()) continue;
          ++found;
          EXPECT_TRUE(at::equal(got[i], expected[i])) << "gradient " << i;
        }
      }
      EXPECT_EQ(found, expected.size()) << "each parameter on one rank";
    }
  }
}

// A tensor as an operator may return it: lazily conjugated or negated, dense in any order, with gaps,
// expanded, empty, without dimensions.
at::Tensor random_tensor() {
  const auto number = [](std::int64_t below) { return torch::randint(below, {1}).item<std::int64_t>(); };
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat};
  std::vector<std::int64_t> sizes;
  for (std::int64_t dims = number(7); dims > 0 && sizes.size() < 4; --dims) sizes.push_back(2 + number(3));
  at::Tensor tensor = (torch::randn(sizes, at::kDouble) * 4).to(types[number(5)]);
  if (tensor.is_complex()) {
    tensor = torch::view_as_complex(torch::randn({2, 3, 2})).expand({2, 3});
    if (number(3) > 0) tensor = tensor.conj();
    if (number(2) > 0) tensor = torch::imag(tensor);  // of a conjugate: lazily negated
  }
  if (number(4) == 0) tensor = at::_neg_view(tensor.is_floating_point() ? tensor : torch::randn({2, 3}));
  if (tensor.dim() > 1 && number(2) > 0) tensor = tensor.transpose(0, tensor.dim() - 1);
  if (tensor.dim() == 4 && number(2) > 0) tensor = tensor.contiguous(at::MemoryFormat::ChannelsLast);
  if (tensor.dim() > 0 && number(4) == 0) tensor = tensor.slice(0, 0, tensor.size(0), 2);
  if (number(5) == 0) {
    sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), 3);
    tensor = tensor.expand(sizes);
  }
  if (tensor.dim() > 0 && number(6) == 0) tensor = tensor.narrow(0, 0, 0);
  return number(8) == 0 ? at::Tensor() : tensor;
}

TEST(RanksTest, TensorsOfAnyLayoutArriveAsTheyAre) {
  torch::manual_seed(1);
  std::vector<Message> messages;
  int lazy = 0, channels_last = 0;
  for (int m = 0; m < 60; ++m) {
    Message message{m, {}, {}};
    for (int i = 0; i < 3; ++i) {
      message.tensors.push_back(random_tensor());
      message.requires_grad.push_back(i == 1);
      const at::Tensor& last = message.tensors.back();
      if (!last.defined()) continue;
      lazy += last.is_neg() || last.is_conj();
      channels_last +=
          last.dim() == 4 && !last.is_contiguous() && last.is_contiguous(at::MemoryFormat::ChannelsLast);
    }
    messages.push_back(std::move(message));
  }
  EXPECT_GT(lazy, 5);
  EXPECT_GT(channels_last, 5);
  for (const char* backend : {"gloo", "shm"}) {
    cohort::test::run_ranks(2, backend, [&](comm::Group& group) {
      GroupChannel channel(group, 1 - group.rank(), /*tag=*/0, /*capacity=*/2, c10::kCPU);
      const base::Deadline deadline(std::chrono::seconds(20));
      for (const Message& sent : messages) {
        if (group.rank() == 0) {
          channel.send(sent, deadline);
          continue;
        }
        const Message got = channel.receive(deadline);
        SCOPED_TRACE(sent.micro_batch);
        EXPECT_EQ(got.micro_batch, sent.micro_batch);
        EXPECT_EQ(got.requires_grad, sent.requires_grad);
        expect_same_bits(got.tensors, sent.tensors, "tensor");
        for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
          if (!sent.tensors[i].defined()) continue;
          EXPECT_EQ(got.tensors[i].scalar_type(), sent.tensors[i].scalar_type());
          if (!sent.tensors[i].is_non_overlapping_and_dense()) continue;
          EXPECT_EQ(got.tensors[i].strides(), sent.tensors[i].strides());
        }
      }
      channel.flush();
    });
  }
}

TEST(RanksTest, ManyTensorsFitIntoOneMessage) {
  cohort::test::run_ranks(2, "gloo", [&](comm::Group& group) {
    GroupChannel channel(group, 1 - group.rank(), /*tag=*/0, /*capacity=*/2, c10::kCPU);
    const base::Deadline deadline(std::chrono::seconds(20));
    Message message{0, Tensors(40, torch::ones({1, 2, 1, 2})), std::vector<bool>(40, true)};
    if (group.rank() == 0) {
      channel.send(message, deadline);
      channel.flush();
      message.tensors.resize(60, message.tensors.front());
      message.requires_grad.resize(60);
      COHORT_EXPECT_THROW_WITH(channel.send(message, deadline), UsageError, "60 tensors between two stages");
    } else {
      expect_same_bits(channel.receive(deadline).tensors, message.tensors, "tensor");
    }
  });
}

// Until there are none, which may take longer than the pipeline's own timeout.
void wait_for_late_stages(Pipeline& pipe) {
  const base::Deadline deadline(std::chrono::seconds(20));
  for (;;) {
    try {
      return pipe.wait_for_late_stages();
    } catch (const TimeoutError&) {
      if (deadline.expired()) throw;
    }
  }
}

// One rank is late: what the others sent it is still on its way when they give up. No later step takes it for
// its own: the group is at its end.
TEST(RanksTest, AStepAfterATimeoutIsRejected) {
  const at::Tensor input = torch::randn({11, 10}), other = torch::randn({11, 10}),
                   target = torch::randn({11, 5});
  auto whole = mlp();
  Pipeline threads(cut(whole, {3}), two(Schedule::kOneFOneB));
  const at::Tensor expected = threads.step(other, target, mse);
  for (const char* backend : {"gloo", "shm"}) {
    for (const int late : {0, 1}) {
      std::vector<torch::nn::Sequential> models{mlp(), mlp()};
      cohort::test::run_ranks(2, backend, [&](comm::Group& group) {
        auto stages = cut(models[static_cast<std::size_t>(group.rank())], {3});
        stages[static_cast<std::size_t>(1 - group.rank())] = Stage::remote();
        PipelineOptions options = two(Schedule::kOneFOneB);
        options.group = group;
        options.timeout = std::chrono::milliseconds(250);
        std::atomic<bool> is_held{group.rank() == late};
        options.on_action = [&](const Action&) {
          if (is_held.exchange(false)) std::this_thread::sleep_for(std::chrono::milliseconds(500));
        };
        Pipeline pipe(stages, options);
        EXPECT_THROW(pipe.step(input, target, mse), Error);
        std::string rejected;
        for (int tries = 0; tries < 20 && rejected.find("cannot be used") == std::string::npos; ++tries) {
          wait_for_late_stages(pipe);
          zero_grad(pipe.parameters());
          try {
            EXPECT_TRUE(at::equal(pipe.step(other, target, mse), expected));
          } catch (const Error& error) {
            rejected = error.what();
          }
        }
        wait_for_late_stages(pipe);
        EXPECT_TRUE(
            cohort::test::message_contains(rejected, "group 'world' failed before and cannot be used"));
      });
    }
  }
}

// A rank throws when its stages have ended and before it takes part in handing over the loss. The group's own
// timeout is longer than the pipeline's.
TEST(RanksTest, ALossThatDoesNotComeIsATimeoutOfTheStep) {
  for (const char* backend : {"gloo", "shm"}) {
    for (const int gone : {0, 1}) {
      SCOPED_TRACE(base::concat(backend, ", without rank ", gone));
      cohort::test::Gate is_over;
      const auto body = [&](comm::Group& group) {
        const Stage mean([](const Tensors& in) { return Tensors{in.at(0).square().mean()}; }, {});
        std::vector<Stage> stages{torch::nn::Linear(4, 4), mean};
        stages[static_cast<std::size_t>(1 - group.rank())] = Stage::remote();
        PipelineOptions options = two(Schedule::kOneFOneB);
        options.group = group;
        options.timeout = std::chrono::seconds(2);
        const at::Tensor input = torch::randn({6, 4}).requires_grad_();
        const bool is_gone = group.rank() == gone;
        if (is_gone && gone == 0) {
          input.register_hook([](const at::Tensor&) -> at::Tensor { throw DataError("user.code", "gone"); });
        }
        options.keep_outputs = is_gone && gone == 1;  // which have no dimension to put them together by
        Pipeline pipe(stages, options);
        const auto step = [&] {
          pipe.step(Tensors{input}, {}, [](const Tensors& out, const Tensors&) { return out.at(0); });
        };
        const base::Deadline patience(std::chrono::seconds(20));
        if (is_gone) {
          COHORT_EXPECT_THROW_WITH(step(), Error, gone == 0 ? "gone" : "has no dimension");
          is_over.wait();
        } else {
          COHORT_EXPECT_THROW_WITH(step(), TimeoutError, "waited 2000 ms for a step: the loss of rank 1, ");
          EXPECT_FALSE(patience.expired());
          is_over.open();
        }
      };
      cohort::test::run_ranks(2, backend, body, std::chrono::seconds(60));
    }
  }
}

TEST(RanksTest, WhatDoesNotGoTogetherIsRejected) {
  cohort::test::run_ranks(2, "gloo", [&](comm::Group& group) {
    auto model = mlp();
    PipelineOptions options = two(Schedule::kOneFOneB);
    options.group = group;
    COHORT_EXPECT_THROW_WITH(Pipeline({Stage::remote(), Stage::remote()}, options), UsageError,
                             base::concat("stage ", group.rank(), " is on this rank, got Stage::remote()"));
    Pipeline pipe(cut(model, {3}), options);
    COHORT_EXPECT_THROW_WITH(pipe.forward(torch::randn({3, 10})), UsageError,
                             "called on a pipeline over ranks");
    options.placements = base::parse_placements("cpu:0");
    COHORT_EXPECT_THROW_WITH(Pipeline(cut(model, {3}), options), UsageError,
                             "got 1 placements, expected one for each of the 2 ranks");
  });
}

}  // namespace
}  // namespace cohort::pipeline
