#include "cohort/ops/check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cohort/ops/operator.h"
#include "tests/support/throws.h"

namespace cohort::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor contiguous_square(const at::Tensor& x) {
  const at::Tensor c = x.contiguous();
  return c * c;
}
at::Tensor empty_meta(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}
Tensors right_gradient(const Call& call, const Tensors& gradients) {
  return {2 * gradients[0] * call.tensor(0)};
}

at::Tensor copy_without_strides(const at::Tensor& x) {
  at::Tensor y = at::empty(x.sizes(), x.options());
  for (std::int64_t i = 0; i < x.numel(); ++i) y.data_ptr<double>()[i] = x.data_ptr<double>()[i];
  return y;
}

TORCH_LIBRARY(check_test, library) {
  const auto sound = [&](const char* schema) -> Definition { return define(library, schema); };
  sound("right(Tensor x) -> Tensor").cpu(&contiguous_square).meta(&empty_meta).backward(&right_gradient);
  sound("wrong_gradient(Tensor x) -> Tensor")
      .cpu(&contiguous_square)
      .meta(&empty_meta)
      .backward([](const Call& call, const Tensors& gradients) {
        at::Tensor gradient = 2 * gradients[0] * call.tensor(0);
        const at::Tensor mask = at::zeros_like(gradient);
        mask.view(-1)[1].fill_(1);
        return Tensors{gradient + mask};  // wrong in one element
      });
  sound("flat_gradient(Tensor x) -> Tensor")
      .cpu(&contiguous_square)
      .meta(&empty_meta)
      .backward([](const Call& call, const Tensors& gradients) {
        return Tensors{2 * gradients[0].view(-1).view(gradients[0].sizes()) * call.tensor(0)};
      });
  sound("no_gradient(Tensor x) -> Tensor").cpu(&contiguous_square).meta(&empty_meta);
  library.def("no_autograd(Tensor x) -> Tensor");
  library.impl("no_autograd", torch::dispatch(c10::DispatchKey::CPU, &contiguous_square));
  library.impl("no_autograd", torch::dispatch(c10::DispatchKey::Meta, &empty_meta));
  sound("writes(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    at::Tensor y = x;
    y.view(-1)[2].fill_(5);
    return x.clone();
  });
  sound("returns_its_argument(Tensor x) -> Tensor").cpu(+[](const at::Tensor& x) { return x; });
  sound("says_it_shares(Tensor(a) x) -> Tensor(a)").cpu(+[](const at::Tensor& x) { return x.clone(); });
  sound("view(Tensor(a) x) -> Tensor(a)")
      .cpu(+[](const at::Tensor& x) { return x.select(0, 0); })
      .meta(+[](const at::Tensor& x) { return x.select(0, 0); });
  sound("doubles_(Tensor(a!) x) -> Tensor(a!)")
      .cpu(+[](at::Tensor& x) -> at::Tensor& { return x.mul_(2); })
      .meta(+[](at::Tensor& x) -> at::Tensor& { return x; });
  sound("no_meta(Tensor x) -> Tensor").cpu(&contiguous_square);
  sound("meta_sizes(Tensor x) -> Tensor").cpu(&contiguous_square).meta(+[](const at::Tensor& x) {
    return at::empty({x.numel()}, x.options());
  });
  sound("meta_dtype(Tensor x) -> Tensor").cpu(&contiguous_square).meta(+[](const at::Tensor& x) {
    return at::empty(x.sizes(), x.options().dtype(at::kHalf));
  });
  sound("meta_strides(Tensor x) -> Tensor").cpu(&contiguous_square).meta(+[](const at::Tensor& x) {
    return at::empty({x.size(1), x.size(0)}, x.options()).t();
  });
  sound("ignores_strides(Tensor x) -> Tensor").meta(&empty_meta).cpu(&copy_without_strides);
  sound("ignores_order(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    return copy_without_strides(x.is_non_overlapping_and_dense() ? x : x.contiguous());
  });
  sound("ignores_stride_0(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    return copy_without_strides(x.dim() > 0 && x.stride(0) == 0 ? x : x.contiguous());
  });
  sound("throws_on_strides(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    return x.view(-1).clone().view(x.sizes());
  });
  sound("ignores_strides_of_gradients(Tensor x) -> Tensor")
      .cpu(&contiguous_square)
      .meta(&empty_meta)
      .backward([](const Call& call, const Tensors& gradients) {
        return Tensors{2 * copy_without_strides(gradients[0]) * call.tensor(0)};
      });
  sound("ignores_strides_in_backward(Tensor x) -> Tensor")
      .cpu(&contiguous_square)
      .meta(&empty_meta)
      .backward([](const Call& call, const Tensors& gradients) {
        return Tensors{2 * gradients[0] * copy_without_strides(call.tensor(0))};
      });
  // In place: element after element of memory, of the gaps too, or on a copy that gets lost.
  sound("doubles_memory_(Tensor(a!) x) -> ()").meta(+[](at::Tensor&) {}).cpu(+[](at::Tensor& x) {
    for (std::int64_t i = 0; i < x.numel(); ++i) x.data_ptr<double>()[i] *= 2;
  });
  sound("fills_storage_(Tensor(a!) x) -> ()").meta(+[](at::Tensor&) {}).cpu(+[](at::Tensor& x) {
    at::empty({0}, x.options()).set_(x.storage()).fill_(7);
    x.fill_(3);
  });
  sound("doubles_a_copy_(Tensor(a!)[] xs) -> ()").meta(+[](at::TensorList) {}).cpu(+[](at::TensorList xs) {
    for (const at::Tensor& x : xs) x.contiguous().mul_(2);
  });
  sound("copies_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
      .meta(+[](const at::Tensor&, at::Tensor& out) -> at::Tensor& { return out; })
      .cpu(+[](const at::Tensor& x, at::Tensor& out) -> at::Tensor& {
        // Right in what it returns, which is not what was handed in.
        if (out.is_contiguous()) return out.copy_(x);
        out = x.clone();
        return out;
      });
  sound("writes_where_there_are_strides(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    const at::Tensor y = contiguous_square(x);
    if (!x.is_contiguous()) x.select(0, 0).fill_(5);
    return y;
  });
  sound("meta_of_a_number(Tensor x) -> Tensor").cpu(&contiguous_square).meta(+[](const at::Tensor& x) {
    return x.dim() == 0 ? at::empty({1}, x.options()) : empty_meta(x);
  });
  sound("flattens_nothing(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    return x.numel() == 0 ? at::empty({0}, x.options()) : contiguous_square(x);
  });
  sound("returns_a_number(Tensor x) -> Tensor").meta(&empty_meta).cpu(+[](const at::Tensor& x) {
    return x.dim() == 0 ? x : contiguous_square(x);
  });
  sound("gradient_of_a_number(Tensor x) -> Tensor")
      .cpu(&contiguous_square)
      .meta(&empty_meta)
      .backward([](const Call& call, const Tensors& gradients) {
        return Tensors{(call.tensor(0).dim() == 0 ? 1 : 2) * gradients[0] * call.tensor(0)};
      });
}

at::Tensor x() {
  return at::arange(1, 7, at::kDouble).view({2, 3}).requires_grad_();
}
at::Tensor call(const std::string& name, const at::Tensor& argument) {
  return find<at::Tensor(const at::Tensor&)>("check_test::" + name).call(argument);
}

TEST(GradcheckTest, ARightGradientPasses) {
  gradcheck([](const Tensors& in) { return Tensors{call("right", in[0])}; }, {x()});
  gradgradcheck([](const Tensors& in) { return Tensors{call("right", in[0])}; }, {x()});
  // Several inputs, some constant, several outputs, one without a gradient, other strides.
  gradcheck(
      [](const Tensors& in) {
        return Tensors{at::matmul(in[0], in[1]), in[2].exp() * in[0].sum(), at::argmax(in[0])};
      },
      {x(), x().detach().t().requires_grad_(), at::ones({}, at::kDouble)});
}

TEST(GradcheckTest, AWrongElementIsNamedWithBothValues) {
  COHORT_EXPECT_THROW_WITH(
      gradcheck([](const Tensors& in) { return Tensors{call("wrong_gradient", in[0])}; }, {x()}), CheckError,
      "[ops.gradcheck] the gradient of output 0 at (0, 0) by input 0 at (0, 1): backward gives 1, "
      "differences "
      "give 0 (allowed 1e-05)");
  COHORT_EXPECT_THROW_WITH(
      gradcheck(
          [](const Tensors& in) {
            return Tensors{in[0].sum(), in[1] * call("wrong_gradient", in[2]).select(0, 1)};
          },
          {x(), at::ones({3}, at::kDouble), x()}),
      CheckError, "the gradient of output 1 at (0) by input 2 at (0, 1): backward gives 1,");
}

TEST(GradcheckTest, AGradientThatIsNotANumberIsFound) {
  COHORT_EXPECT_THROW_WITH(gradcheck([](const Tensors& in) { return Tensors{at::sqrt(in[0] * 0)}; }, {x()}),
                           CheckError, "backward gives nan");
}

TEST(GradcheckTest, AGradientThatChangesIsFound) {
  int calls = 0;
  COHORT_EXPECT_THROW_WITH(gradcheck(
                               [&](const Tensors& in) {
                                 at::Tensor y = in[0] * 1;
                                 y.register_hook([&](const at::Tensor& g) { return g + 1e-9 * ++calls; });
                                 return Tensors{y};
                               },
                               {x()}),
                           CheckError, "is not the same twice");
}

/// Its backward is right and made of numbers that autograd does not see.
struct Once : torch::autograd::Function<Once> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& in) {
    ctx->save_for_backward({in});
    return in * in;
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
    return {2 * ctx->get_saved_variables()[0].detach() * gradients[0]};
  }
};

TEST(GradcheckTest, AGradientOfTheGradientThatIsLostIsFound) {
  const auto function = [](const Tensors& in) { return Tensors{Once::apply(in[0])}; };
  gradcheck(function, {x()});
  COHORT_EXPECT_THROW_WITH(
      gradgradcheck(function, {x()}), CheckError,
      "[ops.gradgradcheck] the gradient of output 0 at (0, 0) by input 0 at (0, 0): backward "
      "gives 0, differences give ");
}

TEST(GradcheckTest, WhatCannotBeCheckedIsRejected) {
  const auto same = [](const Tensors& in) { return in; };
  COHORT_EXPECT_THROW_WITH(gradcheck(same, {at::ones({2}).requires_grad_()}), UsageError,
                           "want float64 on the CPU");
  COHORT_EXPECT_THROW_WITH(gradcheck(same, {at::ones({2}, at::kDouble)}), UsageError,
                           "no input requires a gradient");
  COHORT_EXPECT_THROW_WITH(gradcheck([](const Tensors& in) { return Tensors{in[0].detach()}; }, {x()}),
                           CheckError, "no output requires a gradient");
}

TEST(OpcheckTest, SoundOperatorsPass) {
  opcheck("check_test::right", {x()});
  opcheck("check_test::right", {x().detach().t()});
  opcheck("check_test::view", {x().detach()});
  opcheck("check_test::doubles_", {x().detach()});
  opcheck("check_test::no_meta", {x().detach()}, OpcheckOptions().meta(false));
  const at::Tensor kept = x().detach();
  opcheck("check_test::doubles_", {kept});
  EXPECT_EQ(kept[0][0].item<double>(), 1);  // the check works on copies
}

void expect_rejected(const std::string& name, const std::string& part, bool gradient = false) {
  const at::Tensor argument = gradient ? x() : x().detach();
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::" + name, {argument}), CheckError, part);
}

TEST(OpcheckTest, AWrongBackwardIsRejected) {
  expect_rejected("wrong_gradient", "by input 0 at (0, 1): backward gives 1, differences give 0", true);
}

TEST(OpcheckTest, AWrongSchemaIsRejected) {
  expect_rejected(
      "writes",
      "[ops.opcheck] check_test::writes: argument 0 ('x') was written to: element 2 was 3 and is 5");
  expect_rejected("returns_its_argument", "output 0 shares memory with argument 0 ('x')");
  expect_rejected("says_it_shares",
                  "the schema says that output 0 shares memory with an argument, and it does not");
}

TEST(OpcheckTest, AWrongMetaFunctionIsRejected) {
  expect_rejected("no_meta", "has no meta function");
  expect_rejected("meta_sizes", "output 0 has sizes [2, 3], its meta function says [6]");
  expect_rejected("meta_dtype", "output 0 is Double, its meta function says Half");
  expect_rejected("meta_strides", "output 0 has strides [3, 1], its meta function says [1, 2]");
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::right", {x().detach()}, OpcheckOptions().meta(false)),
                           CheckError, "was told that it has none");
}

TEST(OpcheckTest, AKernelThatTakesMemoryForContiguousIsRejected) {
  expect_rejected("ignores_strides",
                  "element 1 of output 0 is 0 on tensors with gaps between their elements, 2 on");
  expect_rejected("ignores_order", "element 1 of output 0 is 4 on transposed tensors, 2 on contiguous ones");
  expect_rejected("ignores_stride_0", "element 3 of output 0 is 4 on expanded tensors, 1 on contiguous ones");
  expect_rejected("throws_on_strides", "throws on transposed tensors, and not on contiguous ones: view size");
}

TEST(OpcheckTest, WritingToMemoryThatIsTakenForContiguousIsRejected) {
  expect_rejected("doubles_memory_",
                  "element 3 of argument 0 ('x') is 4 on tensors with gaps between their elements, 8 on");
  expect_rejected("fills_storage_",
                  "argument 0 ('x'): memory between its elements was written to on tensors with gaps");
  expect_rejected("writes_where_there_are_strides",
                  "argument 0 ('x') was written to: element 0 was 1 and is 5");
  const Tensors list{x().detach(), x().detach()};
  COHORT_EXPECT_THROW_WITH(
      opcheck("check_test::doubles_a_copy_", {list}), CheckError,
      "element 0 of argument 0 ('xs') is 1 on tensors with gaps between their elements, 2 on contiguous");
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::copies_out", {x().detach(), at::zeros({2, 3}, at::kDouble)}),
                           CheckError, "of argument 1 ('out') is 0 on tensors with gaps");
}

TEST(OpcheckTest, OperatorsOfLibTorchThatWritePass) {
  const at::Tensor x = ops::x().detach(), y = at::randn({2, 3}, at::kDouble);
  const auto out = [] { return at::zeros({2, 3}, at::kDouble); };
  opcheck("aten::mul_.Tensor", {x, y});
  opcheck("aten::add.out", {x, y, 2, out()});
  opcheck("aten::add.out", {x, y, 2, at::empty({0}, at::kDouble)});  // is resized
  opcheck("aten::cumsum.out", {x, 1, c10::IValue(), out()});
  opcheck("aten::sort.values", {y, 1, true, out(), out().to(at::kLong)});
  opcheck("aten::_foreach_mul_.Scalar", {Tensors{x, y}, 3});
  opcheck("aten::scatter_.src", {x, 1, at::arange(4).remainder(3).view({2, 2}), y});
}

TEST(OpcheckTest, ABackwardThatTakesMemoryForContiguousIsRejected) {
  expect_rejected("ignores_strides_of_gradients", "element 3 of the gradient of argument 0 ('x') is ", true);
  expect_rejected("ignores_strides_in_backward",
                  "element 1 of the gradient of argument 0 ('x') is 0 on tensors with gaps", true);
}

TEST(OpcheckTest, WhatIsWrongWithoutDimensionsOrElementsIsRejected) {
  expect_rejected("meta_of_a_number",
                  "meta_of_a_number on tensors without dimensions: output 0 has sizes [], its meta function "
                  "says [1]");
  expect_rejected("returns_a_number",
                  "on tensors without dimensions: output 0 shares memory with argument 0");
  expect_rejected("gradient_of_a_number", "on tensors without dimensions", true);
  expect_rejected("flattens_nothing",
                  "on tensors without elements: output 0 has sizes [0], its meta function says [0, 3]");
}

// Operators of LibTorch, of one and of several tensors, with numbers and lists among the arguments.
TEST(OpcheckTest, OperatorsOfLibTorchPass) {
  opcheck("aten::mul.Tensor", {x(), x()});
  opcheck("aten::tanh", {x()});
  opcheck("aten::softmax.int", {x(), 0});
  opcheck("aten::cat", {std::vector<at::Tensor>{x(), x()}, 0});
  opcheck("aten::mm", {x(), x().detach().t().contiguous().requires_grad_()});
  opcheck("aten::gather", {x(), 1, at::arange(4).remainder(3).view({2, 2})});
  opcheck("aten::embedding", {x(), at::arange(3).remainder(2)}, OpcheckOptions().meta(false));
  // A mean of nothing is no number.
  opcheck("aten::var", {x(), true}, OpcheckOptions().meta(false));
  opcheck("aten::mean", {x()});
}

// What is written to begins anew with each call, and what else needs a gradient has one.
TEST(OpcheckTest, AnArgumentMayBeWrittenToBesideOneThatNeedsAGradient) {
  const at::Tensor written = at::randn({2, 3}, at::kDouble), before = written.clone();
  opcheck("aten::add_.Tensor", {written, x()});
  opcheck("aten::copy_", {written, x()});
  EXPECT_TRUE(at::equal(written, before));
}

TEST(OpcheckTest, ArgumentsStayAsTheyAreHoweverTheyLie) {
  for (const at::Tensor& kept :
       {x().detach(), x().detach().t(), at::ones({3}, at::kDouble), at::ones({}, at::kDouble)}) {
    const at::Tensor before = kept.clone();
    opcheck("check_test::doubles_", {kept});
    EXPECT_TRUE(at::equal(kept, before));
  }
}

TEST(OpcheckTest, ALostGradientIsRejected) {
  expect_rejected("no_autograd", "has no autograd kernel", true);
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::no_gradient", {x()}), UsageError, "has no derivative");
}

TEST(OpcheckTest, ArgumentsThatDoNotFitAreRejected) {
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::right", {x(), 2.0}), UsageError, "2 arguments do not fit");
  COHORT_EXPECT_THROW_WITH(opcheck("check_test::nothing", {x()}), UsageError, "there is no operator");
}

TEST(OpcheckTest, ABackwardThatThrowsOnSomeLayoutIsRejected) {
  COHORT_EXPECT_THROW_WITH(
      opcheck("check_test::flat_gradient", {at::randn({3, 4}, at::kDouble).requires_grad_()}), CheckError,
      "throws on");
}

}  // namespace
}  // namespace cohort::ops
