#include "cohort/autograd/output_aliases.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::autograd {
namespace {

using Tensors = std::vector<at::Tensor>;

// What `of` returns of a tensor with a graph.
Tensors results_of(const std::function<Tensors(const at::Tensor&)>& of, at::Tensor& x) {
  x = at::arange(1, 9, at::kFloat).view({2, 4}).requires_grad_();
  return of(x * 2);
}

const std::vector<std::function<Tensors(const at::Tensor&)>> kShared = {
    [](const at::Tensor& h) { return Tensors{h, h}; },
    [](const at::Tensor& h) { return Tensors{h, h.t(), h.sum()}; },
    [](const at::Tensor& h) { return Tensors{h.view({-1}), h}; },
    [](const at::Tensor& h) { return Tensors{h.view({8}), h.view({4, 2})}; },  // of what is no result
    [](const at::Tensor& h) { return Tensors{h.narrow(1, 0, 3), at::Tensor(), h.narrow(1, 1, 3)}; },
    [](const at::Tensor& h) { return Tensors{h, h.chunk(2)[1]}; },
    [](const at::Tensor& h) {  // views of a complex tensor
      const at::Tensor z = at::complex(h, h + 1);
      return Tensors{at::imag(z), at::imag(z).select(0, 1), at::real(z), at::imag(z)};
    },
    [](const at::Tensor& h) {
      const at::Tensor imaginary = at::imag(at::complex(h, h + 1));
      return Tensors{imaginary, imaginary};
    },
    [](const at::Tensor& h) {  // conjugated and negated ones, which other elements are read by
      const at::Tensor z = at::complex(h, h + 1);
      return Tensors{z, z.conj(), at::imag(z.conj())};
    },
    [](const at::Tensor& h) {  // of what is no result
      const at::Tensor z = at::complex(h, h + 1).view({-1});
      return Tensors{z.narrow(0, 0, 6), z.narrow(0, 1, 5), z.conj().narrow(0, 2, 4)};
    },
    [](const at::Tensor& h) {
      return Tensors{h._neg_view().view({-1}).slice(0, 1), h, at::view_as_complex(h.view({2, 2, 2}))};
    },
};

// Writes to the first result, and uses all.
at::Tensor gradient(Tensors results, const at::Tensor& x) {
  results.front().square_();
  at::Tensor sum = at::zeros({});
  for (const at::Tensor& result : results) {
    if (!result.defined()) continue;
    const at::Tensor squares = (result * result).sum();
    sum = sum + (squares.is_complex() ? at::real(squares) + at::imag(squares) : squares);
  }
  sum.backward();
  return x.grad();
}

TEST(OutputAliasesTest, WhoWritesToOneChangesTheGradientOfTheOther) {
  for (std::size_t i = 0; i < kShared.size(); ++i) {
    at::Tensor x, y;
    const Tensors plain = results_of(kShared[i], x);
    Tensors cut = results_of(kShared[i], y);
    const std::size_t num_results = cut.size();
    OutputAliases views;
    views.detach(cut);
    std::size_t with_gradient = 0;
    for (at::Tensor& each : cut) {
      if (!needs_gradient(each)) continue;
      each = each * 1;  // a history of its own
      ++with_gradient;
    }
    EXPECT_LE(with_gradient, i == 1 ? 2U : 1U) << i;
    views.restore(cut);
    ASSERT_EQ(cut.size(), num_results);
    for (std::size_t k = 0; k < num_results; ++k) EXPECT_EQ(cut[k].defined(), plain[k].defined());
    EXPECT_EQ(cut[0].is_same(cut[1]), plain[0].is_same(plain[1]));
    if (i == 5) continue;  // LibTorch rejects a backward through what was written to
    EXPECT_TRUE(at::equal(gradient(cut, y), gradient(plain, x))) << i;
  }
}

TEST(OutputAliasesTest, ResultsWithNothingInCommonStayAsTheyAre) {
  at::Tensor x;
  Tensors results = results_of(
      [](const at::Tensor& h) {
        const Tensors halves = h.chunk(2);
        return Tensors{halves[0], halves[1], h + 1, at::Tensor(), h.detach()};
      },
      x);
  const Tensors before = results;
  OutputAliases views;
  views.detach(results);
  ASSERT_EQ(results.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(before[i].defined() ? results[i].is_same(before[i]) : !results[i].defined()) << i;
  }
  views.restore(results);
  EXPECT_EQ(results.size(), before.size());
  Tensors none;
  OutputAliases().restore(none);
}

TEST(OutputAliasesTest, ViewsOfOthersStayAsTheyAre) {
  const at::Tensor h = at::ones({2, 2}).requires_grad_() * 2;
  Tensors results{h, h.t()};
  OutputAliases views;
  views.detach(results, {h});
  EXPECT_TRUE(needs_gradient(results[1]));
}

TEST(OutputAliasesTest, ARecomputedPartReturnsThem) {
  for (const std::size_t i : {0, 1, 2, 3, 4, 8, 9, 10}) {
    const auto& shared = kShared[i];
    std::array<at::Tensor, 2> gradients;
    for (const bool recomputes : {false, true}) {
      const at::Tensor x = at::arange(1, 9, at::kFloat).view({2, 4}).requires_grad_();
      const auto fn = [&](const at::Tensor& in) { return shared(in * 2); };
      gradients[recomputes ? 1 : 0] = gradient(recomputes ? recompute(fn, x) : fn(x), x);
    }
    EXPECT_TRUE(at::equal(gradients[0], gradients[1])) << i;
  }
}

// A view of what needs no gradient, which is made to need one: its gradient is its own.
TEST(OutputAliasesTest, AViewThatIsALeafIsNotMadeAgain) {
  const at::Tensor x = at::ones({2, 2});
  for (const at::Tensor& leaf : {x.view({-1}).requires_grad_(), x.chunk(2)[0].requires_grad_()}) {
    ASSERT_TRUE(leaf.is_view() && leaf.is_leaf());
    EXPECT_FALSE(is_writable_view(leaf, x));
    EXPECT_FALSE(is_remade_view(leaf, x));
    Tensors results{x, leaf};
    OutputAliases views;
    views.detach(results);
    views.restore(results);
    EXPECT_TRUE(results[1].is_same(leaf));
  }
  // Before the view was taken from it, x needed none either.
  at::Tensor base = at::ones({2, 2});
  const at::Tensor view = base.view({-1});
  base.requires_grad_();
  EXPECT_FALSE(is_writable_view(view, base));
}

// It comes back from a recomputed part, which makes another one when it runs again.
TEST(OutputAliasesTest, ARecomputedPartThatMakesALeafIsRejectedInBackward) {
  const at::Tensor x = at::ones({2, 2});
  const Tensors results =
      recompute([](const at::Tensor& in) { return Tensors{in.view({-1}).requires_grad_(), in + 1}; }, x);
  EXPECT_TRUE(at::equal(results[0], x.view({-1})));
  COHORT_EXPECT_THROW_WITH(results[0].sum().backward(), UsageError, "that it did not use before");
}

// Such a view says that it requires a gradient.
TEST(OutputAliasesTest, AViewTakenWithoutGradientsHasNone) {
  const at::Tensor x = at::ones({2, 2}).requires_grad_();
  const auto view = [](const at::Tensor& of) {
    const at::NoGradGuard no_grad;
    return of.view({-1});
  };
  EXPECT_TRUE(view(x).requires_grad());
  EXPECT_FALSE(needs_gradient(view(x)));
  EXPECT_FALSE(needs_gradient(view(x * 2)));
  EXPECT_FALSE(needs_gradient(at::Tensor()));
  EXPECT_TRUE(needs_gradient(x));
  EXPECT_TRUE(needs_gradient((x * 2).view({-1})));
  DetachedGraph part({x});
  const Tensors results = part.end({view(part.leaves()[0]), part.leaves()[0] * 3});
  EXPECT_EQ(part.needs_gradient(), (std::vector<bool>{false, true}));
  EXPECT_TRUE(at::equal(part.backward({at::ones({2, 2})}, false).front(), at::full({2, 2}, 3.0)));
}

}  // namespace
}  // namespace cohort::autograd
