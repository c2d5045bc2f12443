#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/script/script.h"
#include "like_eager.h"
#include "tests/support/contains.h"

// Losses that use some of a function's results, others from call to call.
namespace cohort::script {
namespace {

using test::Body;
using test::contains;
using test::same_bits;

struct Named {
  const char* name;
  std::function<Body(const Tensors& weights)> body;
};

// Derivatives of some results are infinite or NaN at 0, which the first element of the input is.
const std::vector<Named> kFunctions = {
    {"an infinite derivative",
     [](const Tensors&) {
       return [](const Tensors& in) { return Tensors{in[0] * 2 + 1, in[0].sqrt() + 1, in[0].log() * 3}; };
     }},
    {"results that lead to different weights",
     [](const Tensors& w) {
       return [=](const Tensors& in) {
         return Tensors{(in[0] * w[0]).exp(), (in[0].detach() * w[1]).sqrt() * 2, in[0].sqrt() * w[0]};
       };
     }},
    {"a result that another is made of",
     [](const Tensors& w) {
       return [=](const Tensors& in) {
         const at::Tensor hidden = (in[0] * w[0]).tanh();
         return Tensors{hidden, hidden.abs().sqrt() * w[1], hidden.sum() * w[1]};
       };
     }},
    {"results of one operator",
     [](const Tensors& w) {
       return [=](const Tensors& in) {
         const Tensors parts = (in[0] * w[0]).chunk(2);
         return Tensors{parts[0] * 2, parts[1].sqrt(), (parts[0] / parts[1]).log()};
       };
     }},
};

// Gradients of the input and of the weights for a loss of the results in `used`, a mask. `spoils`: the other
// results, whose values backward may have kept, are changed in place before.
Tensors gradients_of(const Body& run, const Tensors& weights, int call, unsigned used, bool spoils) {
  at::manual_seed(call);
  at::Tensor x = at::rand({4});
  x[0] = 0;
  x.requires_grad_();
  Tensors results = run({x}), roots, grad_outputs;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor grad_output = at::rand(results[i].sizes());
    if ((used >> i & 1) != 0) {
      roots.push_back(results[i]);
      grad_outputs.push_back(grad_output);
    } else if (spoils) {
      results[i].detach().zero_();
    }
  }
  Tensors leaves = weights;
  leaves.push_back(x);
  return torch::autograd::grad(roots, leaves, grad_outputs, std::nullopt, false, /*allow_unused=*/true);
}

Tensors weights() {
  at::manual_seed(1);
  return {at::rand({4}).requires_grad_(), at::rand({4}).requires_grad_()};
}

TEST(LossesTest, OfAnyResultsInAnyOrderHaveEagersGradients) {
  for (const Named& function : kFunctions) {
    int programs = 0;
    for (unsigned seed = 0; seed < 30; ++seed) {
      const Tensors w = weights();
      const Body body = function.body(w);
      Function fast(body, ScriptOptions().min_operators(0));
      std::minstd_rand draw(seed + 1);
      unsigned used = 1 + draw() % 7;
      for (int call = 0; call < 14; ++call) {
        if (draw() % (seed % 2 == 0 ? 6 : 2) == 0) used = 1 + draw() % 7;
        SCOPED_TRACE(base::concat(function.name, ", seed ", seed, ", call ", call, ", results ", used));
        std::string eagers_error, error;
        Tensors expected, found;
        const bool spoils = seed % 3 == 2;
        eagers_error = test::error_of([&] { expected = gradients_of(body, w, call, used, spoils); });
        error = test::error_of([&] { found = gradients_of(std::ref(fast), w, call, used, spoils); });
        ASSERT_TRUE(error.empty() || !eagers_error.empty()) << error << fast.explain();
        if (!error.empty()) continue;
        // Where the function ran again, what spoils eager's backward spoils nothing.
        if (!eagers_error.empty()) expected = gradients_of(body, w, call, used, false);
        ASSERT_TRUE(same_bits(expected, found)) << expected << found << fast.explain();
      }
      programs += contains(fast.explain(), "program: ") ? 1 : 0;
    }
    EXPECT_GT(programs, 15) << function.name;
  }
}

TEST(LossesTest, OfOtherResultsThanBeforeAreRecordedAnew) {
  const Tensors w = weights();
  for (const Named& function : kFunctions) {
    const Body body = function.body(w);
    Function fast(body, ScriptOptions().min_operators(0));
    for (const unsigned used : {1U, 3U, 2U, 5U}) {
      for (int call = 0; call < 6; ++call) gradients_of(std::ref(fast), w, call, used, false);
      EXPECT_TRUE(contains(fast.explain(), "program: ")) << function.name << used << fast.explain();
    }
  }
}

// Autograd hands the gradient of a sum on to both as one tensor.
TEST(LossesTest, OfASumOfResultsAndThenOfAnotherSum) {
  for (const Named& function : kFunctions) {
    const Tensors w = weights();
    const Body body = function.body(w);
    for (int changes = 2; changes < 9; ++changes) {
      Function fast(body, ScriptOptions().min_operators(0));
      for (int call = 0; call < 12; ++call) {
        const auto gradients = [&](const Body& run) {
          const at::Tensor x = at::full({4}, 0.25 * (call + 1)).requires_grad_();
          const Tensors y = run({x});
          const double first = call < changes ? 1 : call % 3;  // 0 leaves it out
          at::Tensor loss = y[2];
          if (first != 0) loss = loss + (first == 1 ? y[0] : y[0] * first);
          const at::Tensor grad_output = at::rand(loss.sizes());
          return torch::autograd::grad({loss}, {x, w[0]}, {grad_output}, std::nullopt, false, true);
        };
        at::manual_seed(call);
        const Tensors expected = gradients(body);
        at::manual_seed(call);
        const Tensors found = gradients(std::ref(fast));
        ASSERT_TRUE(same_bits(expected, found)) << function.name << changes << call << fast.explain();
      }
    }
  }
}

// One graph, two backwards.
TEST(LossesTest, OfOneResultAfterTheOther) {
  for (const Named& function : kFunctions) {
    const Tensors w = weights();
    const Body body = function.body(w);
    Function fast(body, ScriptOptions().min_operators(0));
    for (int call = 0; call < 12; ++call) {
      const auto gradients = [&](const Body& run) {
        at::Tensor x = at::full({4}, 0.25 * call);
        x.requires_grad_();
        const Tensors results = run({x});
        Tensors found;
        for (const std::size_t i : {0, 2}) {
          const Tensors of_result = torch::autograd::grad(
              {results[i].sum()}, {x, w[0]}, {}, /*retain_graph=*/true, false, /*allow_unused=*/true);
          found.insert(found.end(), of_result.begin(), of_result.end());
        }
        return found;
      };
      const Tensors expected = gradients(body), found = gradients(std::ref(fast));
      ASSERT_TRUE(same_bits(expected, found)) << function.name << call << expected << found << fast.explain();
    }
  }
}

// Its forward writes to what it reads, so it cannot run a second time.
TEST(LossesTest, OfSomeResultsOfAFunctionThatCountsItsCalls) {
  const Tensors w = weights();
  const auto gradients = [&](bool is_scripted) {
    const at::Tensor count = at::ones({4});
    const Body body = [&](const Tensors& in) {
      const at::Tensor before = count * 1;
      count.add_(1);
      return Tensors{(in[0] * before * w[0]).exp(), (in[0] * before).sin() * w[1], before * w[1]};
    };
    Function fast(body, ScriptOptions().min_operators(0));
    Tensors found;
    for (int call = 0; call < 21; ++call) {
      const unsigned used = 1 + (call / 4) % 7;
      for (const at::Tensor& each : is_scripted ? gradients_of(std::ref(fast), w, call, used, false)
                                                : gradients_of(body, w, call, used, false)) {
        found.push_back(each);
      }
    }
    found.push_back(count);
    return found;
  };
  EXPECT_TRUE(same_bits(gradients(false), gradients(true)));
}

}  // namespace
}  // namespace cohort::script
