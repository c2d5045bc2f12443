#include "cohort/ops/operator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cohort/base/error.h"
#include "cohort/ops/check.h"
#include "cohort/optim/autocast.h"
#include "tests/support/throws.h"

namespace cohort::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

int num_backwards = 0;
bool second_was_needed = false;

at::Tensor scale(const at::Tensor& x, double by) {
  return x.detach() * by;  // called below autograd
}
at::Tensor tanh_kernel(const at::Tensor& x) {
  return at::tanh(x);
}
at::Tensor weighted(const at::Tensor& x, const std::optional<at::Tensor>& weight, at::TensorList more) {
  at::Tensor sum = weight.has_value() ? x * *weight : x.clone();
  for (const at::Tensor& term : more) sum = sum + term * term;
  return sum;
}
at::Tensor dtype_of(const at::Tensor& x, const at::Tensor& y) {
  return at::empty({0}, x.options().dtype(at::promote_types(x.scalar_type(), y.scalar_type())));
}
at::Tensor& add_one_(at::Tensor& x) {
  return x.add_(1);
}
std::tuple<at::Tensor, at::Tensor> largest(const at::Tensor& x) {
  auto [values, indices] = x.max(0);
  return {values, indices};
}
at::Tensor power(double by, const std::optional<at::Tensor>& /*more*/, const at::Tensor& x,
                 at::IntArrayRef /*unused*/, at::TensorList factors) {
  at::Tensor product = at::pow(x, by);
  for (const at::Tensor& factor : factors) product = product * factor;
  return product;
}
at::Tensor row(const at::Tensor& x) {
  return x.select(0, 0);
}
std::vector<at::Tensor> pair(const at::Tensor& x) {
  return {x * 1, x * 2};
}
at::Tensor optional_list(const at::Tensor& x, const std::optional<at::ArrayRef<at::Tensor>>& /*more*/) {
  return x * 1;
}

TORCH_LIBRARY(ops_test, library) {
  define(library, "scale(Tensor x, float by) -> Tensor")
      .cpu(&scale)
      .backward([](const Call& call, const Tensors& gradients) {
        ++num_backwards;
        return Tensors{gradients[0] * call.argument<double>(1)};
      });
  define(library, "tanh(Tensor x) -> Tensor")
      .composite(&tanh_kernel)
      .save_outputs()
      .derivative([](const Call& call) { return Tensors{1 - call.output() * call.output()}; });
  define(library, "weighted(Tensor x, Tensor? weight, Tensor[] more) -> Tensor")
      .composite(&weighted)
      .backward([](const Call& call, const Tensors& gradients) {
        second_was_needed = call.needs_gradient(1);
        const at::Tensor &g = gradients[0], &weight = call.tensor(1);
        Tensors result{weight.defined() ? g * weight : g,
                       weight.defined() ? g * call.tensor(0) : at::Tensor()};
        for (const at::Tensor& term : call.argument<Tensors>(2)) result.push_back(2 * g * term);
        return result;
      });
  define(library, "power(float by, Tensor? more, Tensor x, int[] unused, Tensor[] factors) -> Tensor")
      .composite(&power)
      .derivative([](const Call& call) {
        const double by = call.argument<double>(0);
        at::Tensor product = at::ones({}, at::kDouble);
        for (const at::Tensor& factor : call.argument<Tensors>(4)) product = product * factor;
        Tensors result{at::Tensor(), by * at::pow(call.tensor(2), by - 1) * product};
        for (std::size_t i = 0; i < call.argument<Tensors>(4).size(); ++i) {
          result.push_back(at::pow(call.tensor(2), by) * product / call.argument<Tensors>(4)[i]);
        }
        return result;
      });
  define(library, "row(Tensor(a) x) -> Tensor(a)").cpu(&row);
  define(library, "pair(Tensor x) -> Tensor[]").cpu(&pair);
  define(library, "optional_list(Tensor x, Tensor[]? more) -> Tensor").cpu(&optional_list);
  define(library, "no_derivative(Tensor x) -> Tensor").composite(&tanh_kernel);
  define(library, "too_few(Tensor x, Tensor y) -> Tensor")
      .composite(&dtype_of)
      .backward([](const Call&, const Tensors& g) { return Tensors{g[0]}; });
  define(library, "as_products(Tensor x, Tensor y) -> Tensor")
      .composite(&dtype_of)
      .autocast(Autocast::kNarrow);
  define(library, "as_sums(Tensor x, Tensor y) -> Tensor").composite(&dtype_of).autocast(Autocast::kFloat32);
  define(library, "as_widest(Tensor x, Tensor y) -> Tensor").composite(&dtype_of).autocast(Autocast::kWidest);
  define(library, "add_one_(Tensor(a!) x) -> Tensor(a!)").cpu(&add_one_);
  define(library, "largest(Tensor x) -> (Tensor, Tensor)")
      .cpu(&largest)
      .backward([](const Call& call, const Tensors& gradients) {
        const at::Tensor& x = call.tensor(0);
        return Tensors{gradients[0] * (x == std::get<0>(x.max(0))).to(x.dtype())};
      });
}

at::Tensor call_scale(const at::Tensor& x, double by) {
  static const auto op = find<at::Tensor(const at::Tensor&, double)>("ops_test::scale");
  return op.call(x, by);
}
at::Tensor call_one(const std::string& name, const at::Tensor& x) {
  return find<at::Tensor(const at::Tensor&)>("ops_test::" + name).call(x);
}
at::Tensor call_two(const std::string& name, const at::Tensor& x, const at::Tensor& y) {
  return find<at::Tensor(const at::Tensor&, const at::Tensor&)>("ops_test::" + name).call(x, y);
}

at::Tensor numbers(at::IntArrayRef sizes) {
  at::manual_seed(7);
  return at::rand(sizes, at::kDouble).add(0.1).requires_grad_();
}

TEST(OperatorTest, WorksInEagerModeAndInAutograd) {
  const at::Tensor x = numbers({3});
  num_backwards = 0;
  const at::Tensor y = call_scale(x, 2);
  EXPECT_TRUE(at::equal(y, x * 2));
  ASSERT_TRUE(y.requires_grad());
  (y * y).sum().backward();
  EXPECT_EQ(num_backwards, 1);
  EXPECT_TRUE(at::allclose(x.grad(), 8 * x));
}

TEST(OperatorTest, NothingIsKeptWhereNoGradientIsWanted) {
  const at::Tensor x = numbers({3});
  EXPECT_FALSE(call_scale(x.detach(), 2).requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(call_scale(x, 2).requires_grad());
}

TEST(OperatorTest, IsDifferentiatedTwiceThroughItsBackward) {
  gradcheck([](const Tensors& x) { return Tensors{call_scale(x[0], 3)}; }, {numbers({2, 2})});
  gradgradcheck([](const Tensors& x) { return Tensors{call_scale(x[0] * x[0], 3)}; }, {numbers({2, 2})});
}

TEST(OperatorTest, ADerivativeMayUseTheOutput) {
  const auto function = [](const Tensors& x) { return Tensors{call_one("tanh", x[0])}; };
  gradcheck(function, {numbers({2, 3})});
  gradgradcheck(function, {numbers({2, 3})});
}

TEST(OperatorTest, TakesOptionalTensorsAndLists) {
  const auto op = find<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, at::TensorList)>(
      "ops_test::weighted");
  gradcheck([&](const Tensors& x) { return Tensors{op.call(x[0], x[1], Tensors{x[2], x[3]})}; },
            {numbers({2}), numbers({2}), numbers({2}), numbers({2})});
  EXPECT_TRUE(second_was_needed);
  gradcheck([&](const Tensors& x) { return Tensors{op.call(x[0], std::nullopt, Tensors{x[1]})}; },
            {numbers({2}), numbers({2})});
  gradcheck([&](const Tensors& x) { return Tensors{op.call(x[0], x[1], Tensors{})}; },
            {numbers({2}), numbers({2}).detach()});
  EXPECT_FALSE(second_was_needed);
}

TEST(OperatorTest, ADerivativeFindsTheTensorsWhereverTheyStand) {
  using Signature = at::Tensor(double, const std::optional<at::Tensor>&, const at::Tensor&, at::IntArrayRef,
                               at::TensorList);
  static const auto power_of = find<Signature>("ops_test::power");
  const auto function = [&](const Tensors& in) {
    return Tensors{power_of.call(2.5, std::nullopt, in[0], {1, 2}, {in[1], in[2]})};
  };
  gradcheck(function, {numbers({2, 3}), numbers({3}), numbers({2, 1})});  // broadcast ones too
}

// A base `y` that backward needs, and a result of an operator that shares its memory.
TEST(OperatorTest, WhoWritesToAResultThatIsAPartOfAnArgumentIsSeen) {
  const at::Tensor x = numbers({2, 3});
  at::Tensor y = x.detach().clone();
  const at::Tensor product = x * y;
  call_one("row", y).mul_(10);
  COHORT_EXPECT_THROW_WITH(product.sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(OperatorTest, ASchemaWithoutAGradientSaysSoBeforeOneIsLost) {
  const at::Tensor x = numbers({2, 3});
  COHORT_EXPECT_THROW_WITH(call_one("row", x), UsageError, "returns its arguments or parts of them");
  static const auto pairs = find<std::vector<at::Tensor>(const at::Tensor&)>("ops_test::pair");
  COHORT_EXPECT_THROW_WITH(pairs.call(x), UsageError, "ops_test::pair returns lists of tensors");
  const at::NoGradGuard no_grad;
  EXPECT_EQ(call_one("row", x).size(0), 3);
  EXPECT_EQ(pairs.call(x).size(), 2U);
}

TEST(OperatorTest, ABackwardForASchemaWithoutAGradientIsRejected) {
  const Backward backward = [](const Call&, const Tensors& g) { return g; };
  const Derivative derivative = [](const Call&) { return Tensors(); };
  torch::Library library(torch::Library::FRAGMENT, "ops_test", std::nullopt, __FILE__, __LINE__);
  const auto rejected = [&](const std::string& schema, const std::string& part) {
    COHORT_EXPECT_THROW_WITH(define(library, "b_" + schema).backward(backward), UsageError, part);
    COHORT_EXPECT_THROW_WITH(define(library, "d_" + schema).derivative(derivative), UsageError, part);
  };
  rejected("view(Tensor(a) x) -> Tensor(a)", "view returns its arguments");
  rejected("second(Tensor x, Tensor(a) y) -> (Tensor, Tensor(a))", "second returns its arguments");
  rejected("write_(Tensor(a!) x) -> Tensor(a!)", "write_ writes to its arguments");
  rejected("out(Tensor x, *, Tensor(a!) out) -> ()", "out writes to its arguments");
  rejected("list(Tensor x) -> Tensor[]", "list returns lists");
}

TEST(OperatorTest, ArgumentsWhoseTensorsAutogradDoesNotSeeAreRejected) {
  torch::Library library(torch::Library::FRAGMENT, "ops_test", std::nullopt, __FILE__, __LINE__);
  for (const char* type : {"Tensor?[]", "Tensor[][]", "Dict(str, Tensor)", "(Tensor, int)"}) {
    COHORT_EXPECT_THROW_WITH(define(library, base::concat("unseen(", type, " xs) -> Tensor")), UsageError,
                             "argument 'xs' of unseen is");
  }
}

TEST(OperatorTest, AnOutputOfIndicesHasNoGradient) {
  const at::Tensor x = numbers({4});
  const auto [value, index] =
      find<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&)>("ops_test::largest").call(x);
  EXPECT_TRUE(value.requires_grad());
  EXPECT_FALSE(index.requires_grad());
  value.backward();
  EXPECT_EQ(x.grad().sum().item<double>(), 1);
}

TEST(OperatorTest, WithoutADerivativeBackwardNamesTheOperator) {
  const at::Tensor x = numbers({3});
  const at::Tensor y = call_one("no_derivative", x);
  EXPECT_TRUE(y.requires_grad());  // so that the gradient is not lost without a word
  COHORT_EXPECT_THROW_WITH(y.sum().backward(), UsageError,
                           "[ops.backward] ops_test::no_derivative has no derivative");
}

TEST(OperatorTest, AGradientTooFewIsRejected) {
  const at::Tensor x = numbers({3});
  const at::Tensor y = call_two("too_few", x, numbers({3}));
  COHORT_EXPECT_THROW_WITH(y.sum().backward(), UsageError,
                           "backward of ops_test::too_few gave 1 gradients, expected 2");
}

TEST(OperatorTest, AutocastFollowsTheRule) {
  const at::Tensor x = at::ones({2}), narrow = x.to(at::kBFloat16), wide = x.to(at::kDouble);
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  EXPECT_EQ(call_two("as_products", x, x).scalar_type(), at::kBFloat16);
  EXPECT_EQ(call_two("as_sums", narrow, x).scalar_type(), at::kFloat);
  EXPECT_EQ(call_two("as_widest", narrow, narrow).scalar_type(), at::kBFloat16);
  EXPECT_EQ(call_two("as_widest", narrow, x).scalar_type(), at::kFloat);
  EXPECT_EQ(call_two("as_products", wide, wide).scalar_type(), at::kDouble);
  const at::Tensor parameter = at::ones({2}).requires_grad_();
  const at::Tensor y = call_scale(at::mul(parameter, 1), 2);  // no rule: float32 it stays
  EXPECT_EQ(y.scalar_type(), at::kFloat);
}

TEST(OperatorTest, WritingInPlaceIsSeenByAutograd) {
  const auto add_one = find<at::Tensor&(at::Tensor&)>("ops_test::add_one_");
  at::Tensor x = at::ones({2});
  const at::Tensor weight = at::ones({2}).requires_grad_();
  const at::Tensor y = (weight * x).sum();
  const auto version = x._version();
  add_one.call(x);
  EXPECT_EQ(x[0].item<float>(), 2);
  EXPECT_GT(x._version(), version);
  EXPECT_THROW(y.backward(), c10::Error);  // a value that backward needs is gone
  at::Tensor leaf = at::ones({2}).requires_grad_();
  at::Tensor inner = leaf * 1;
  COHORT_EXPECT_THROW_WITH(add_one.call(inner), UsageError,
                           "writes to its arguments, which cannot be differentiated");
}

// The argument would miss that its elements have a history: autograd rejects that, as for any view whose
// operator it does not know.
TEST(OperatorTest, AResultThatIsAPartOfItsArgumentIsAViewOfIt) {
  const at::Tensor x = at::ones({2, 3}), weight = at::full({}, 2.F).requires_grad_();
  at::Tensor first = call_one("row", x);
  EXPECT_TRUE(first.is_view());
  EXPECT_TRUE(first._base().is_same(x));
  first.mul_(5);
  EXPECT_EQ(x[0][1].item<float>(), 5);
  EXPECT_EQ(x._version(), first._version());
  COHORT_EXPECT_THROW_WITH(first.mul_(weight), c10::Error, "created inside a custom Function");
  EXPECT_FALSE(x.requires_grad());
  const at::Tensor made_without = [&] {
    const at::NoGradGuard no_grad;
    return call_one("row", x);
  }();
  COHORT_EXPECT_THROW_WITH(at::Tensor(made_without).mul_(weight), c10::Error, "no_grad mode");
}

TEST(OperatorTest, UnknownNamesAndOtherTypesAreRejected) {
  COHORT_EXPECT_THROW_WITH(find_operator("ops_test::scalee"), UsageError,
                           "[ops.find] there is no operator 'ops_test::scalee'");
  COHORT_EXPECT_THROW_WITH((find<at::Tensor(const at::Tensor&)>("ops_test::scale")), UsageError,
                           "ops_test::scale has other types");
}

}  // namespace
}  // namespace cohort::ops
