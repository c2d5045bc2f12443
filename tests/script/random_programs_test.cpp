#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>
#include <ostream>

#include "cohort/optim/sgd.h"
#include "cohort/script/fork.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "same_bits.h"
#include "tests/support/random/random_calls.h"
#include "tests/support/random/random_steps.h"
#include "tests/support/seeds.h"

namespace cohort::script {
namespace {

using test::expect_like_plain;
using test::RandomProgram;

// As docs/guide/script.md says: graphs that come in unseen, and inputs of which one sees what another gets.
const std::vector<std::string> kRejections = {
    "with a graph of its own", "hand over a clone() of one of them", "step the optimizer after backward",
    "A view was created in no_grad", "random operators ran in a forked part", "the function cannot run again",
    // A recorded call goes back through results too that got no gradient: LibTorch looks at what those saved.
    "modified by an inplace operation"};

auto of_three(const RandomProgram& program) {
  return
      [program](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return program({a, b, c}); };
}

const test::Seeds kSeeds = test::Seeds::usual(500);

struct ProgramKind {
  const char* name;
  std::vector<test::ExtraStep> steps = {};
  test::RandomCallsOptions calls = {};
  bool switches_gradients = true;
  /// Only verified calls find what other threads do meanwhile, and an input that is what the function
  /// captured.
  bool needs_verified_calls = false;
};

// Turns LibTorch's switches from the fourth call on.
void turn_switches(int call, test::Draw& draw) {
  auto& context = at::globalContext();
  const auto is_on = [&] { return call < 3 || draw(3) != 0; };
  context.setUserEnabledMkldnn(is_on());
  context.setSDPUseFlash(is_on());
  context.setSDPUseMath(true);
  context.setDeterministicAlgorithms(call >= 3 && draw(4) == 0, /*warn_only=*/true);
}

std::vector<ProgramKind> kinds() {
  using namespace test::random_steps;
  return {
      {.name = "Plain"},
      {.name = "FilledByCpp", .steps = {use_filled, use_filled, use_indices}, .calls = {.calls = 8}},
      {.name = "Lazy", .steps = {use_lazy}, .calls = {.calls = 8, .changes_grad_outputs = true}},
      {.name = "Threads", .steps = {use_threads}, .calls = {.calls = 8}, .needs_verified_calls = true},
      {.name = "NewLosses", .calls = {.calls = 8, .changes_grad_outputs = true}},
      {.name = "ChangesBeforeBackward",
       .calls = {.calls = 8, .changes_before_backward = true},
       .switches_gradients = false},  // nodes whose gradients go nowhere complain too, and are not replayed
      {.name = "OtherInputs", .steps = {use_filled}, .calls = {.calls = 10, .changes_inputs = true}},
      {.name = "CapturedInputs",
       .calls = {.calls = 8, .shares_captured = true},
       .needs_verified_calls = true},
      {.name = "ForwardMode", .calls = {.calls = 8, .has_duals = true}},
      {.name = "HooksThatUpdate", .calls = {.calls = 6, .updates_in_hooks = true}},
  };
}

// The module whose tensors are guarded: what the program captured.
struct Watched : torch::nn::Module {
  explicit Watched(const test::Captured& captured) {
    register_parameter("a", captured.parameters[0]);
    register_parameter("b", captured.parameters[1]);
    register_buffer("c", captured.buffers[0]);
  }
};

void PrintTo(const ProgramKind& kind, std::ostream* out) {
  *out << kind.name;
}

class RandomKindsTest : public ::testing::TestWithParam<ProgramKind> {};

TEST_P(RandomKindsTest, ReplaysDoWhatThePlainCallDoes) {
  int compared = 0;
  for (unsigned seed = kSeeds.first; seed < kSeeds.end && !HasFailure(); ++seed) {
    // A verified call returns the function's own result, and ends a program that is wrong: half of the
    // programs are replayed as they are, of the others none may end.
    const bool verify = GetParam().needs_verified_calls || seed / 2 % 2 == 0;
    std::function<std::string()> explain = [] { return std::string(); };
    compared += expect_like_plain(
        seed,
        [&](const RandomProgram& program, const test::Captured& captured) -> test::Run {
          auto fast =
              script(of_three(program),
                     ScriptOptions().min_operators(0).gradient_chunk_bytes(seed % 2).verify(verify).modules(
                         {std::make_shared<Watched>(captured)}));
          explain = [=] { return fast.explain(); };
          return [=](const test::Tensors& in) mutable { return fast(in.at(0), in.at(1), in.at(2)); };
        },
        kRejections, {.switches_gradients = GetParam().switches_gradients, .extra_steps = GetParam().steps},
        GetParam().calls);
    if (GetParam().needs_verified_calls) continue;
    EXPECT_EQ(explain().find("a verification found"), std::string::npos) << "seed " << seed << "\n"
                                                                         << explain();
  }
  EXPECT_TRUE(HasFailure() || compared > static_cast<int>(kSeeds.count())) << compared;
}

INSTANTIATE_TEST_SUITE_P(All, RandomKindsTest, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(RandomProgramsTest, ReplaysDoWhatThePlainCallDoesWhenSwitchesTurn) {
  for (unsigned seed = kSeeds.first; seed < kSeeds.end && !HasFailure(); ++seed) {
    at::manual_seed(seed);
    torch::nn::Dropout ours(0.5);
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(16, 16));
    test::RandomCallsOptions calls{.calls = 8};
    calls.before_call = [=](int call, test::Draw& draw) mutable {
      turn_switches(call, draw);
      ours->train(call < 3 || draw(2) == 0);
    };
    expect_like_plain(
        seed,
        [&](const RandomProgram& program, const test::Captured&) -> test::Run {
          auto fast = script(of_three(program), ScriptOptions().min_operators(0).modules({ours.ptr()}));
          return [=](const test::Tensors& in) mutable { return fast(in.at(0), in.at(1), in.at(2)); };
        },
        kRejections, {.extra_steps = {test::random_steps::use_switches(ours, lstm)}}, calls);
  }
  test::Draw draw(0);
  turn_switches(0, draw);
}

TEST(RandomProgramsTest, ForkedPartsDoWhatThePlainCallDoes) {
  for (unsigned seed = kSeeds.first; seed < kSeeds.end && !HasFailure(); ++seed) {
    expect_like_plain(
        seed,
        [](const RandomProgram& program, const test::Captured&) -> test::Run {
          return [call = of_three(program)](const test::Tensors& in) {
            return wait(fork(call, in.at(0), in.at(1), in.at(2)));
          };
        },
        kRejections);
  }
}

// Three programs that write to the same buffer and take views of the same inputs, side by side.
TEST(RandomProgramsTest, ScriptedPartsDoWhatThePlainCallsDo) {
  const at::NoGradGuard no_grad;
  int compared = 0;
  for (unsigned seed = kSeeds.first; seed < kSeeds.first + kSeeds.count() / 4 && !HasFailure(); ++seed) {
    const auto make = [seed](const test::Captured& captured, bool forks) {
      const test::RandomProgramOptions options{.draws = false, .switches_gradients = false};
      const auto program = [&](unsigned number) {
        return of_three(RandomProgram(seed * 3 + number, captured, options));
      };
      return [first_program = program(0), second_program = program(1), third_program = program(2), forks](
                 const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
        test::Tensors all;
        const auto add = [&](const test::Tensors& some) {
          for (const at::Tensor& each : some) all.push_back(each * 1.5);
        };
        if (forks) {
          auto first = fork(first_program, a, b, c), second = fork(second_program, a, b, c);
          add(third_program(a, b, c));
          add(wait(first));
          auto third = fork(third_program, b, a, c);
          add(wait(second));
          add(wait(third));
        } else {
          const test::Tensors first = first_program(a, b, c), second = second_program(a, b, c);
          add(third_program(a, b, c));
          add(first);
          const test::Tensors third = third_program(b, a, c);
          add(second);
          add(third);
        }
        return all;
      };
    };
    const test::Captured ours = test::Captured::make(seed), theirs = test::Captured::make(seed);
    auto plain = make(ours, false);
    auto fast = script(make(theirs, true), ScriptOptions().min_operators(0).verify(seed % 2 == 0));
    const auto run = [&](auto& function, const test::Captured& captured, int call, std::string& error) {
      at::manual_seed(seed * 100 + static_cast<unsigned>(call));
      test::Tensors seen{at::randn({4, 4}), at::randn({4, 4}), at::randn({4})};
      try {
        for (const at::Tensor& each : function(seen[0], seen[1], seen[2])) seen.push_back(each);
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      seen.push_back(captured.buffers[0].clone());
      return seen;
    };
    for (int call = 0; call < 12; ++call) {
      std::string rejected, error;
      const test::Tensors expected = run(plain, ours, call, rejected), found = run(fast, theirs, call, error);
      if (!rejected.empty()) break;
      ASSERT_EQ(error, "") << seed << " call " << call << "\n" << fast.explain();
      ASSERT_TRUE(test::same_bits(expected, found)) << seed << " call " << call << "\n" << fast.explain();
      ++compared;
    }
  }
  EXPECT_TRUE(HasFailure() || compared > static_cast<int>(kSeeds.count())) << compared;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(unsigned seed) : captured(test::Captured::make(seed)), program(seed, captured) {
    register_parameter("a", captured.parameters[0]);
    register_parameter("b", captured.parameters[1]);
    register_buffer("c", captured.buffers[0]);
  }
  test::Tensors forward(const at::Tensor& x) { return program({x, x.t(), x.slice(0, 0, 1).view({4})}); }
  test::Captured captured;
  RandomProgram program;
};
TORCH_MODULE(Net);

at::Tensor sum_of_squares(const test::Tensors& results, const at::Tensor& target) {
  at::Tensor loss = at::zeros({});
  for (const at::Tensor& result : results) loss = loss + (result.sigmoid() - target).square().sum();
  return loss;
}

// Losses, parameters, gradients, buffers, batches and the generator, after each step.
test::Tensors train(unsigned seed, bool scripted, std::string& error) {
  Net net(seed);
  optim::SGD optimizer(net->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  auto step = script_step(net, sum_of_squares, optimizer);
  test::Tensors seen;
  try {
    for (unsigned i = 0; i < 5; ++i) {
      at::manual_seed(seed * 10 + i);
      const at::Tensor x = at::randn({4, 4}), target = at::rand({});
      if (scripted) {
        seen.push_back(step(x, target));
      } else {
        optimizer.zero_grad();
        const at::Tensor loss = sum_of_squares(net->forward(x), target);
        loss.backward();
        optimizer.step();
        seen.push_back(loss.detach());
      }
      for (const at::Tensor& parameter : net->parameters()) {
        seen.push_back(parameter.detach().clone());
        seen.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      }
      seen.insert(seen.end(), {net->captured.buffers[0].detach().clone(), x.detach().clone(), at::rand({3})});
    }
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  return seen;
}

TEST(RandomProgramsTest, StepsDoWhatThePlainLoopDoes) {
  int compared = 0;
  for (unsigned seed = kSeeds.first; seed < kSeeds.end && !HasFailure(); ++seed) {
    std::string rejected, error;
    const test::Tensors expected = train(seed, false, rejected), found = train(seed, true, error);
    if (!rejected.empty()) continue;
    EXPECT_EQ(error, "") << seed;
    EXPECT_TRUE(test::same_bits(expected, found)) << seed;
    ++compared;
  }
  EXPECT_TRUE(HasFailure() || compared > static_cast<int>(kSeeds.count() / 3)) << compared;
}

}  // namespace
}  // namespace cohort::script
