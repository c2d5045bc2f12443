#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/optim/sgd.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"

// What backward reads, and what changes it between forward and backward: an error, as in eager mode.
namespace cohort::script {
namespace {

using test::Body;
using test::contains;
using test::error_of;
using test::same_bits;

struct Change {
  const char* name;
  // Of the function's inputs and results, and of what it captured.
  std::function<void(const Tensors& inputs, const Tensors& results, const Tensors& captured)> apply;
};

// A function that is made twice, for eager mode and to be scripted, each of captured tensors of its own.
struct Subject {
  std::function<Tensors()> capture;
  std::function<Body(const Tensors& captured)> make;
  std::function<Tensors()> inputs;
};

struct Outcome {
  std::string error;
  Tensors gradients;
};

Outcome change_before_backward(const Body& run, const Subject& subject, const Tensors& captured,
                               const Change* change) {
  at::manual_seed(3);
  const Tensors inputs = subject.inputs();
  Tensors leaves;
  for (const Tensors* some : {&inputs, &captured}) {
    for (const at::Tensor& tensor : *some) {
      if (tensor.requires_grad()) leaves.push_back(tensor);
    }
  }
  Outcome outcome;
  outcome.error = error_of([&] {
    const Tensors results = run(inputs);
    if (change != nullptr) change->apply(inputs, results, captured);
    outcome.gradients = test::gradients_of({results[0]}, leaves);
  });
  return outcome;
}

// Changes what `change` says in calls 4 and 6, and expects an error where eager mode has one, and else the
// same gradients.
void expect_alike(const Subject& subject, const Change& change, bool must_throw) {
  SCOPED_TRACE(change.name);
  const Tensors ours = subject.capture(), theirs = subject.capture();
  const Body eager = subject.make(ours);
  const std::shared_ptr<Function> fast =
      std::make_shared<Function>(subject.make(theirs), ScriptOptions().min_operators(0));
  const Body scripted = [fast](const Tensors& in) { return (*fast)(in); };
  for (int call = 0; call < 7; ++call) {
    const Change* const now = call >= 4 && call % 2 == 0 ? &change : nullptr;
    const Outcome expected = change_before_backward(eager, subject, ours, now);
    const Outcome found = change_before_backward(scripted, subject, theirs, now);
    ASSERT_EQ(now != nullptr && must_throw, !expected.error.empty()) << "the test: " << expected.error;
    ASSERT_EQ(expected.error.empty(), found.error.empty())
        << "call " << call << ": " << expected.error << "\nscripted: " << found.error << fast->explain();
    ASSERT_TRUE(same_bits(expected.gradients, found.gradients)) << "call " << call << fast->explain();
  }
}

using View = std::function<at::Tensor(const at::Tensor&)>;
struct NamedView {
  const char* name;
  View view;
};
// Of [2, 3], and each with a shape of its own.
const std::vector<NamedView> kViews = {
    {"itself", [](const at::Tensor& t) { return t; }},
    {"view", [](const at::Tensor& t) { return t.view({-1}); }},
    {"t", [](const at::Tensor& t) { return t.t(); }},
    {"select", [](const at::Tensor& t) { return t[1]; }},
    {"slice", [](const at::Tensor& t) { return t.slice(1, 0, 3, 2); }},
    {"expand", [](const at::Tensor& t) { return t.expand({2, 2, 3}); }},
    {"unsqueeze", [](const at::Tensor& t) { return t.unsqueeze(1); }},
    {"diagonal", [](const at::Tensor& t) { return t.diagonal(); }},
    {"as_strided", [](const at::Tensor& t) { return t.as_strided({3}, {2}, 1); }},
    {"unbind", [](const at::Tensor& t) { return t.unbind(0)[0]; }},
    {"chunk of a view", [](const at::Tensor& t) { return t.view({3, 2}).chunk(2, 1)[1]; }},
    {"detach and view", [](const at::Tensor& t) { return t.detach().view({3, 2}); }},
    {"view of another type and back",
     [](const at::Tensor& t) { return t.detach().view(at::kInt).view(at::kFloat); }},
    {"_neg_view", [](const at::Tensor& t) { return t.detach()._neg_view(); }},
};

Change add_to(const char* name,
              std::function<at::Tensor(const Tensors&, const Tensors&, const Tensors&)> of) {
  return {name, [of = std::move(of)](const Tensors& in, const Tensors& out, const Tensors& captured) {
            const at::NoGradGuard no_grad;
            of(in, out, captured).add_(1);
          }};
}

const Change kInput = add_to("the input", [](const auto& in, const auto&, const auto&) { return in[0]; });
const Change kPartOfInput =
    add_to("a part of the input", [](const auto& in, const auto&, const auto&) { return in[0][0]; });
const Change kCaptured =
    add_to("the captured tensor", [](const auto&, const auto&, const auto& captured) { return captured[0]; });
const Change kPartOfCaptured =
    add_to("a part of the captured tensor",
           [](const auto&, const auto&, const auto& captured) { return captured[0].detach().select(1, 2); });
const Change kOther = add_to("a tensor that nobody reads",
                             [](const auto&, const auto&, const auto& captured) { return captured[1]; });

at::Tensor numbers() {
  return at::arange(1, 7).to(at::kFloat).view({2, 3});
}

TEST(VersionCountersTest, AViewOfAnInputThatBackwardReads) {
  for (const auto& [name, view] : kViews) {
    SCOPED_TRACE(name);
    const Subject subject = {
        .capture = [] { return Tensors{at::full({1}, 0.5).requires_grad_(), at::ones({2})}; },
        .make =
            [&](const Tensors& captured) {
              return [&view, w = captured[0]](const Tensors& in) {
                return Tensors{(view(in[0]) * w).sum() * 2};
              };
            },
        .inputs = [] { return Tensors{numbers()}; }};
    expect_alike(subject, kInput, true);
    expect_alike(subject, kPartOfInput, true);
    expect_alike(subject, kOther, false);
  }
}

TEST(VersionCountersTest, AViewOfAParameterOrBufferThatBackwardReads) {
  for (const auto& [name, view] : kViews) {
    for (const bool is_parameter : {false, true}) {
      SCOPED_TRACE(std::string(name) + (is_parameter ? " of a parameter" : " of a buffer"));
      const Subject subject = {
          .capture = [=] { return Tensors{numbers().requires_grad_(is_parameter), at::ones({2})}; },
          .make =
              [&](const Tensors& captured) {
                return [&view, w = captured[0]](const Tensors& in) {
                  return Tensors{(in[0] * view(w)).tanh().sum() * 2};
                };
              },
          .inputs = [] { return Tensors{at::full({1}, 0.25).requires_grad_()}; }};
      expect_alike(subject, kCaptured, true);
      expect_alike(subject, kPartOfCaptured, true);
      expect_alike(subject, kOther, false);
    }
  }
}

// An optimizer's step between forward and backward, as in a badly written GAN.
TEST(VersionCountersTest, AStepOfTheOptimizerBetweenForwardAndBackward) {
  const Subject subject = {.capture =
                               [] {
                                 at::Tensor gamma = at::ones({4}).requires_grad_();
                                 gamma.mutable_grad() = at::ones({4});
                                 return Tensors{gamma};
                               },
                           .make =
                               [](const Tensors& captured) {
                                 return [gamma = captured[0]](const Tensors& in) {
                                   return Tensors{(in[0] * gamma.view({1, 4, 1, 1})).tanh().mean()};
                                 };
                               },
                           .inputs = [] { return Tensors{at::randn({2, 4, 3, 3}).requires_grad_()}; }};
  const Change step = {"the optimizer's step", [](const Tensors&, const Tensors&, const Tensors& captured) {
                         optim::SGD({captured[0]}, optim::SGDOptions(0.1)).step();
                       }};
  expect_alike(subject, step, true);
}

TEST(VersionCountersTest, ResultsThatBackwardReads) {
  const auto result = [](std::size_t which) {
    return Change{"result", [=](const Tensors&, const Tensors& results, const Tensors&) {
                    at::Tensor(results[which]).zero_();
                  }};
  };
  const auto subject_of = [](const Body& body) {
    return Subject{.capture = [] { return Tensors(); },
                   .make = [body](const Tensors&) { return body; },
                   .inputs = [] { return Tensors{numbers().sin().requires_grad_()}; }};
  };
  const std::vector<Body> with_second_read = {
      [](const Tensors& in) {
        const auto [values, indices] = in[0].topk(2, 1);
        return Tensors{values.mul(3).sum(), indices.view({-1})};
      },
      [](const Tensors& in) {
        const auto [values, indices] = in[0].max(1);
        return Tensors{values.sum() * 2, indices};
      },
      [](const Tensors& in) {
        const auto [values, indices] = in[0].sort(1);
        return Tensors{(values * at::arange(3)).sum(), indices.t()[0]};
      },
      [](const Tensors& in) {
        const at::Tensor y = in[0].exp();
        return Tensors{y.sum() * 1, y.detach().view({-1})};
      },
      [](const Tensors& in) {
        const at::Tensor y = in[0].exp();
        return Tensors{y.sum() * 1, y.detach()};
      },
      [](const Tensors& in) {
        const at::Tensor y = in[0].tanh();
        return Tensors{y.sum() * 1, y.view({3, 2})};
      },
      [](const Tensors& in) {
        const at::Tensor y = in[0].sigmoid();
        return Tensors{y.sum() * 1, y.detach().unbind(0)[1], y.detach()[0]};
      },
      [](const Tensors& in) {
        const at::Tensor mask = in[0] > 0;
        return Tensors{at::where(mask, in[0], in[0] * 2).sum(), mask.view({-1})};
      },
      [](const Tensors& in) {
        const at::Tensor scale = in[0].detach() * 3;
        return Tensors{(in[0] * scale.t().reshape({2, 3})).sum() + (in[0] * scale).sum(), scale.view({6})};
      },
  };
  for (std::size_t i = 0; i < with_second_read.size(); ++i) {
    SCOPED_TRACE(i);
    expect_alike(subject_of(with_second_read[i]), result(1), true);
  }
  expect_alike(
      subject_of([](const Tensors& in) { return Tensors{in[0].exp().sum() * 1, in[0].detach() * 2}; }),
      result(1), false);
  expect_alike(subject_of([](const Tensors& in) {
                 const at::Tensor y = in[0] * 2;
                 return Tensors{(y + 1).sum(), y.detach()};
               }),
               result(1), false);
}

// A backward that writes to a tensor that it captured.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& count) {
    context->saved_data["count"] = count;
    return x * 2;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const at::NoGradGuard no_grad;
    context->saved_data["count"].toTensor().add_(1);
    return {gradients[0] * 2, at::Tensor()};
  }
};

TEST(VersionCountersTest, WhatBackwardWritesHasANewVersion) {
  const auto errors = [](bool is_scripted) {
    at::Tensor count = at::zeros({3});
    const auto fn = [=](const at::Tensor& x) { return Counted::apply(x * 1, count) * 3; };
    Function fast([&](const Tensors& in) { return Tensors{fn(in[0])}; }, ScriptOptions().min_operators(0));
    std::vector<bool> threw;
    for (int call = 0; call < 8; ++call) {
      const at::Tensor x = at::ones({3}).requires_grad_(), other = at::ones({3}).requires_grad_();
      const at::Tensor reads_count = other * count;
      const at::Tensor y = is_scripted ? fast({x})[0] : fn(x);
      y.sum().backward();
      EXPECT_TRUE(same_bits(x.grad(), at::full({3}, 6.0))) << call;
      EXPECT_EQ(count[0].item<float>(), static_cast<float>(call + 1));
      threw.push_back(
          contains(error_of([&] { reads_count.sum().backward(); }), "modified by an inplace operation"));
    }
    return threw;
  };
  EXPECT_EQ(errors(false), std::vector<bool>(8, true));
  EXPECT_EQ(errors(true), errors(false));
}

}  // namespace
}  // namespace cohort::script
