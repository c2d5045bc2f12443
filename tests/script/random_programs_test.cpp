#include <gtest/gtest.h>

#include "cohort/optim/sgd.h"
#include "cohort/script/fork.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "same_bits.h"
#include "tests/support/random_program.h"

namespace cohort::script {
namespace {

using test::expect_like_plain;
using test::RandomProgram;

// As docs/script.md says: graphs that come in unseen, and inputs of which one sees what another gets.
const std::vector<std::string> kRefusals = {
    "with a graph of its own", "hand over a clone() of one of them", "step the optimizer after backward",
    "A view was created in no_grad", "random operators ran in a forked part"};

auto of_three(const RandomProgram& program) {
  return
      [program](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return program({a, b, c}); };
}

TEST(RandomProgramsTest, ReplaysDoWhatThePlainCallDoes) {
  int replayed = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    expect_like_plain(
        seed,
        [&](const RandomProgram& program) {
          auto fast = script(of_three(program), ScriptOptions().min_operators(0));
          return [=, &replayed](const test::Tensors& in) mutable {
            test::Tensors results = fast(in.at(0), in.at(1), in.at(2));
            if (fast.explain().find("    program: ") != std::string::npos) ++replayed;
            return results;
          };
        },
        kRefusals);
  }
  EXPECT_GT(replayed, 600);
}

TEST(RandomProgramsTest, ForkedPartsDoWhatThePlainCallDoes) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    expect_like_plain(
        seed,
        [](const RandomProgram& program) {
          return [call = of_three(program)](const test::Tensors& in) {
            return wait(fork(call, in.at(0), in.at(1), in.at(2)));
          };
        },
        kRefusals);
  }
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
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::string refused, error;
    const test::Tensors expected = train(seed, false, refused), found = train(seed, true, error);
    if (!refused.empty()) continue;
    EXPECT_EQ(error, "") << seed;
    EXPECT_TRUE(test::same_bits(expected, found)) << seed;
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

}  // namespace
}  // namespace cohort::script
