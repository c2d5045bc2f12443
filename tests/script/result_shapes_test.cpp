#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/nn/utils/rnn.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/ops/operator.h"
#include "cohort/script/script.h"
#include "like_eager.h"
#include "tests/support/contains.h"

// What results are made of, and sizes that differ from call to call.
namespace cohort::script {
namespace {

using test::contains;
using test::error_of;
using test::same_bits;

at::Tensor input_of(int rows, int call) {
  return at::arange(rows).add(call).to(at::kFloat);
}

// Calls under the guards of `rows`, in turn and back again.
template <typename Fn, typename Check>
void visit_guards(const Fn& fn, const std::vector<int>& rows, const Check& check) {
  const at::NoGradGuard no_grad;
  auto fast = script(fn, ScriptOptions().min_operators(0));
  int call = 0;
  for (int round = 0; round < 3; ++round) {
    for (const int each : rows) {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor x = input_of(each, ++call);
        SCOPED_TRACE("call " + std::to_string(call) + " of " + std::to_string(each));
        check(fn(x), fast(x));
      }
    }
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(ResultShapesTest, WhichOptionalIsSetDependsOnTheGuards) {
  using Result = std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>;
  visit_guards(
      [](const at::Tensor& x) {
        const at::Tensor y = x.exp().add(1);
        return x.size(0) == 1 ? Result{y, std::nullopt} : Result{std::nullopt, y};
      },
      {1, 2, 3},
      [](const Result& expected, const Result& found) {
        ASSERT_EQ(expected.first.has_value(), found.first.has_value());
        ASSERT_EQ(expected.second.has_value(), found.second.has_value());
        EXPECT_TRUE(same_bits(expected.first.value_or(at::Tensor()), found.first.value_or(at::Tensor())));
        EXPECT_TRUE(same_bits(expected.second.value_or(at::Tensor()), found.second.value_or(at::Tensor())));
      });
}

TEST(ResultShapesTest, NumbersAndNamesBesideTensorsDependOnTheGuards) {
  using Result = std::tuple<at::Tensor, std::int64_t, std::string>;
  visit_guards(
      [](const at::Tensor& x) {
        return Result{x.sin().mul(2), x.size(0) * 10, std::to_string(x.size(0)) + " rows"};
      },
      {1, 2, 3},
      [](const Result& expected, const Result& found) {
        EXPECT_TRUE(same_bits(std::get<0>(expected), std::get<0>(found)));
        EXPECT_EQ(std::get<1>(expected), std::get<1>(found));
        EXPECT_EQ(std::get<2>(expected), std::get<2>(found));
      });
}

TEST(ResultShapesTest, NamesOfAMapDependOnTheGuards) {
  using Result = std::map<std::string, at::Tensor>;
  visit_guards(
      [](const at::Tensor& x) {
        return x.size(0) == 2 ? Result{{"a", x * 2}, {"b", x + 1}} : Result{{"b", x * 3}, {"c", x.exp()}};
      },
      {1, 2},
      [](const Result& expected, const Result& found) {
        ASSERT_EQ(expected.size(), found.size());
        for (const auto& [name, tensor] : expected) {
          ASSERT_EQ(found.count(name), 1U) << name;
          EXPECT_TRUE(same_bits(tensor, found.at(name))) << name;
        }
      });
}

TEST(ResultShapesTest, TheAlternativeOfAVariantDependsOnTheGuards) {
  using Result = std::variant<at::Tensor, std::vector<at::Tensor>>;
  visit_guards(
      [](const at::Tensor& x) {
        return x.size(0) == 2 ? Result{x.exp() * 2} : Result{std::vector<at::Tensor>{x * 3}};
      },
      {1, 2},
      [](const Result& expected, const Result& found) { ASSERT_EQ(expected.index(), found.index()); });
}

TEST(ResultShapesTest, TheNestingOfListsDependsOnTheGuards) {
  using Result = std::vector<std::vector<at::Tensor>>;
  visit_guards(
      [](const at::Tensor& x) {
        return x.size(0) == 2 ? Result{{x * 2, x + 1}, {x.exp()}} : Result{{x * 2}, {x + 1, x.exp()}};
      },
      {1, 2},
      [](const Result& expected, const Result& found) {
        ASSERT_EQ(expected.size(), found.size());
        for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(expected[i], found[i]));
      });
}

// Other modes are other guards too.
TEST(ResultShapesTest, ResultsDependOnWhetherGradientsAreOn) {
  using Result = std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>;
  const at::Tensor w = at::ones({3}).requires_grad_();
  const auto fn = [=](const at::Tensor& x) {
    const at::Tensor y = x * w + 1;
    return at::GradMode::is_enabled() ? Result{y, std::nullopt} : Result{std::nullopt, y};
  };
  auto fast = script(fn);
  for (int call = 0; call < 24; ++call) {
    const at::AutoGradMode mode(call / 6 % 2 == 0);
    const Result expected = fn(at::ones({3})), found = fast(at::ones({3}));
    ASSERT_EQ(expected.first.has_value(), found.first.has_value()) << call;
    ASSERT_EQ(expected.second.has_value(), found.second.has_value()) << call;
    if (found.first) found.first->sum().backward();
  }
}

// Sizes that depend on values.

std::vector<at::Tensor> pieces(const at::Tensor& x, const at::Tensor& count) {
  std::vector<at::Tensor> made;
  const auto end = *count.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < end; ++i) made.push_back(x * (i + 1));
  return made;
}

at::Tensor first_rows(const at::Tensor& x, const at::Tensor& count) {
  return x.narrow(0, 0, *count.data_ptr<std::int64_t>()).clone();
}

TORCH_LIBRARY(script_sizes_test, library) {
  ops::define(library, "pieces(Tensor x, Tensor count) -> Tensor[]").cpu(&pieces);
  ops::define(library, "first_rows(Tensor x, Tensor count) -> Tensor").cpu(&first_rows);
}

// A call either has eager mode's results, or throws a UsageError that names the operator.
template <typename Fn>
void expect_like_eager_or_an_error(const Fn& fn, const char* name) {
  const at::NoGradGuard no_grad;
  for (const int later : {1, 2, 3, 40}) {
    auto fast = script(fn);
    for (int call = 0; call < 9; ++call) {
      const at::Tensor x = at::full({50}, 1.0 + call),
                       count = at::scalar_tensor(call < 5 ? 2 : later, at::kLong);
      at::Tensor found;
      const std::string error = error_of([&] { found = fast(x, count); });
      if (error.empty()) {
        EXPECT_TRUE(same_bits(fn(x, count), found)) << call << fast.explain();
      } else {
        EXPECT_TRUE(call >= 5 && later != 2 && contains(error, name)) << call << ": " << error;
      }
    }
  }
}

TEST(ResultShapesTest, AnOperatorThatReturnsALongerOrShorterList) {
  const auto op =
      ops::find<std::vector<at::Tensor>(const at::Tensor&, const at::Tensor&)>("script_sizes_test::pieces");
  expect_like_eager_or_an_error(
      [=](const at::Tensor& x, const at::Tensor& count) { return at::stack(op.call(x, count)).sum(0) * 1; },
      "script_sizes_test::pieces");
  expect_like_eager_or_an_error(
      [=](const at::Tensor& x, const at::Tensor& count) { return op.call(x, count).back() * 2 + 1; },
      "script_sizes_test::pieces");
}

TEST(ResultShapesTest, AnOperatorThatReturnsALongerOrShorterTensor) {
  const auto op =
      ops::find<at::Tensor(const at::Tensor&, const at::Tensor&)>("script_sizes_test::first_rows");
  expect_like_eager_or_an_error(
      [=](const at::Tensor& x, const at::Tensor& count) { return op.call(x, count).mul(2).sum(); },
      "script_sizes_test::first_rows");
}

// Lengths decide how long the data of a packed sequence is; no operator says so.
TEST(ResultShapesTest, DataOfAPackedSequenceIsAsLongAsItsLengthsSay) {
  const auto packed = [](const at::Tensor& x, const at::Tensor& lengths, bool batch_first) {
    return torch::nn::utils::rnn::pack_padded_sequence(x, lengths, batch_first).data();
  };
  const at::Tensor w = at::full({3}, 0.5).requires_grad_();
  const std::vector<std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>> functions = {
      [=](const at::Tensor& x, const at::Tensor& lengths) {
        return (packed(x, lengths, true) * 2).view({-1}).sum();
      },
      [=](const at::Tensor& x, const at::Tensor& lengths) { return packed(x, lengths, true).mul(w).exp(); },
      [=](const at::Tensor& x, const at::Tensor& lengths) {
        return packed(x.transpose(0, 1), lengths, false).sum(0) * w;
      },
  };
  for (const auto& fn : functions) {
    for (const bool has_gradients : {false, true}) {
      const at::AutoGradMode mode(has_gradients);
      auto fast = script(fn);
      for (int call = 0; call < 10; ++call) {
        const at::Tensor x = at::full({2, 5, 3}, 0.1 * call);
        const at::Tensor lengths = call < 5   ? at::tensor({5, 3}, at::kLong)
                                   : call < 7 ? at::tensor({2, 1}, at::kLong)
                                              : at::tensor({4, 4}, at::kLong);
        const at::Tensor expected = fn(x, lengths), found = fast(x, lengths);
        ASSERT_TRUE(same_bits(expected, found)) << call << fast.explain();
        ASSERT_TRUE(same_bits(test::gradients_of({expected}, {w}), test::gradients_of({found}, {w}))) << call;
      }
    }
  }
}

}  // namespace
}  // namespace cohort::script
