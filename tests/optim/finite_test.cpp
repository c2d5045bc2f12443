#include "cohort/optim/finite.h"

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cohort/optim/adam.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/sgd.h"
#include "tests/optim/support.h"

namespace cohort::optim {
namespace {

using Tensors = std::vector<at::Tensor>;

bool finds(const at::Tensor& gradient) {
  at::Tensor parameter = at::zeros(gradient.sizes(), gradient.options().layout(at::kStrided));
  parameter.set_requires_grad(true).mutable_grad() = gradient;
  const NonFinite found = find_non_finite({{.params = {at::zeros({3}), parameter}}});
  EXPECT_FALSE(found.on_device.defined());
  return found.any();
}

TEST(FiniteTest, OneElementOfAnyPlaceAndTypeIsFound) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t size : {1, 7, 16, 33, 600'000}) {
      const at::Tensor plain = at::ones({size}, type);
      EXPECT_FALSE(finds(plain)) << type << size;
      for (const double bad : {test::kInfinity, -test::kInfinity, std::nan("")}) {
        for (const std::int64_t place : {std::int64_t{0}, size / 2, size - 1}) {
          const at::Tensor gradient = plain.clone();
          gradient[place] = bad;
          EXPECT_TRUE(finds(gradient)) << type << " " << bad << " at " << place << " of " << size;
        }
      }
    }
  }
}

TEST(FiniteTest, TheLargestAndTheSmallestNumbersAreFinite) {
  EXPECT_FALSE(finds(at::full({100}, std::numeric_limits<float>::max())));
  EXPECT_FALSE(finds(at::full({100}, -std::numeric_limits<double>::max(), at::kDouble)));
  EXPECT_FALSE(finds(at::full({100}, 65504.0, at::kHalf)));
  EXPECT_FALSE(finds(at::full({100}, std::numeric_limits<float>::denorm_min())));
  EXPECT_FALSE(finds(at::zeros({0})));
  const at::Tensor both = at::cat({at::full({50}, 1e30), at::full({50}, 1e-30), at::full({50}, 1.5)});
  EXPECT_FALSE(finds(both));  // each bit of an exponent is set in one of them
  both[149] = test::kInfinity;
  EXPECT_TRUE(finds(both));
}

TEST(FiniteTest, EveryLayoutIsRead) {
  const at::Tensor wide = at::ones({4, 6});
  wide[2][3] = test::kInfinity;
  EXPECT_TRUE(finds(wide.t()));
  EXPECT_TRUE(finds(wide.slice(1, 2, 5)));
  EXPECT_FALSE(finds(wide.slice(1, 0, 3)));
  EXPECT_TRUE(finds(wide.view({1, 4, 2, 3}).contiguous(at::MemoryFormat::ChannelsLast)));
  EXPECT_TRUE(finds(wide.to_sparse()));
  EXPECT_FALSE(finds(at::eye(3).to_sparse()));
}

TEST(FiniteTest, AScalarAndWhatIsAddedUp) {
  EXPECT_FALSE(non_finite_scalar(at::scalar_tensor(3)).any());
  NonFinite found;
  EXPECT_FALSE(found.any());
  found.add({.on_device = at::zeros({})});
  EXPECT_FALSE(found.any());
  found.add({.on_device = at::ones({})});
  found.add({.on_device = at::zeros({})});
  EXPECT_TRUE(found.any());
  EXPECT_FALSE(found.on_cpu);
  found = {};
  found.add(non_finite_scalar(at::scalar_tensor(test::kInfinity)));
  EXPECT_TRUE(found.on_cpu);
}

TEST(FiniteTest, ClippingKnowsFiniteGradientsOfAnySize) {
  const at::Tensor shape = at::tensor({0.5, -1.0, 0.25, 0.0}, at::kDouble);
  struct TypeScales {
    at::ScalarType type;
    std::vector<double> scales;
  };
  for (const TypeScales& kind :
       {TypeScales{at::kFloat, {1e-30, 1e-10, 1, 1e10, 1e18, 2e19, 4e20, 1e30, 3.4e38}},
        TypeScales{at::kDouble, {1e-30, 1, 1e150, 1e200, 1.7e308}},
        TypeScales{at::kBFloat16, {1e-30, 1, 1e20, 3e38}}, TypeScales{at::kHalf, {1, 6e4}}}) {
    for (const double scale : kind.scales) {
      for (const double max_norm : {1e-3, 1.0}) {
        Tensors parameters;
        for (int i = 0; i < 3; ++i) {
          at::Tensor parameter = at::zeros({4}, kind.type).set_requires_grad(true);
          parameter.mutable_grad() = (shape * scale).to(kind.type);
          parameters.push_back(parameter);
        }
        const double scaled = std::min(scale, max_norm / std::sqrt(3 * 1.3125));
        EXPECT_FALSE(clip_grad_norm_unless_non_finite_({{.params = parameters}}, max_norm).any())
            << kind.type << " " << scale;
        const double tolerance = kind.type == at::kFloat || kind.type == at::kDouble ? 1e-5 : 2e-2;
        for (const at::Tensor& parameter : parameters) {
          const at::Tensor expected = shape * scaled, got = parameter.grad().to(at::kDouble);
          EXPECT_TRUE(at::allclose(got, expected, tolerance, 0)) << kind.type << " " << scale << got;
        }
        // One element decides, and nothing is changed then.
        const at::Tensor before = parameters[0].grad().clone();
        parameters[1].mutable_grad()[2] = test::kInfinity;
        EXPECT_TRUE(clip_grad_norm_unless_non_finite_({{.params = parameters}}, max_norm / 2).on_cpu);
        EXPECT_TRUE(at::equal(parameters[0].grad(), before));
      }
    }
  }
}

TEST(FiniteTest, ClippingDoesNotTouchGradientsWhoseNormIsNotFinite) {
  Tensors parameters = test::fresh_parameters(), same = test::fresh_parameters();
  test::set_gradients(parameters, 1);
  test::set_gradients(same, 1);
  EXPECT_FALSE(clip_grad_norm_unless_non_finite_({{.params = parameters}}, 0.5).any());
  clip_grad_norm_(same, 0.5);
  EXPECT_TRUE(test::same_bits(parameters[0].grad(), same[0].grad()));
  parameters[0].mutable_grad().view(-1)[0] = test::kInfinity;
  EXPECT_TRUE(clip_grad_norm_unless_non_finite_({{.params = parameters}}, 0.5).any());
  EXPECT_TRUE(test::same_bits(parameters[2].grad(), same[2].grad()));
  EXPECT_FALSE(clip_grad_norm_unless_non_finite_({{.params = test::fresh_parameters()}}, 1.0).any());
}

/// An optimizer that does not know of flags.
class SignSGD : public Optimizer {
 public:
  explicit SignSGD(Tensors params) : Optimizer({{.params = std::move(params), .lr = 0.5}}) {}
  std::string type() const override { return "sign_sgd"; }
  void step() override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& p : group.params)
        if (p.grad().defined()) p.add_(p.grad().sign(), -group.lr);
  }
};

using Make = std::function<std::unique_ptr<Optimizer>(const Tensors&)>;

std::vector<std::pair<std::string, Make>> optimizers() {
  return {
      {"sgd", [](const Tensors& p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); }},
      {"sgd with momentum",
       [](const Tensors& p) {
         return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1));
       }},
      {"adam", [](const Tensors& p) { return std::make_unique<Adam>(p, AdamOptions(0.1).amsgrad(true)); }},
      {"adamw", [](const Tensors& p) { return std::make_unique<AdamW>(p, AdamWOptions(0.1)); }},
      {"own", [](const Tensors& p) { return std::make_unique<SignSGD>(p); }},
  };
}

void expect_same_state(Optimizer& left, Optimizer& right) {
  const OptimizerState a = left.state(), b = right.state();
  EXPECT_EQ(a.scalars, b.scalars);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) EXPECT_TRUE(at::equal(tensor, b.tensors.at(name))) << name;
}

// A flag that is known at once, and one that the host reads a step later, as on a GPU.
TEST(FiniteTest, AStepThatIsNotMadeLeavesNoTrace) {
  const NonFinite now{.on_cpu = true}, later{.on_device = at::ones({})};
  for (const NonFinite& found : {now, later}) {
    for (const auto& [name, make] : optimizers()) {
      for (const int bad_step : {1, 2, 4}) {
        SCOPED_TRACE(name + ", " + std::to_string(bad_step));
        Tensors parameters = test::fresh_parameters(), straight = test::fresh_parameters();
        const auto optimizer = make(parameters), peer = make(straight);
        for (int step = 1; step <= 5; ++step) {
          if (step == bad_step) {
            for (at::Tensor& parameter : parameters)
              parameter.mutable_grad() = at::full_like(parameter, test::kInfinity);
            optimizer->step_unless(found);
            if (step == 4) expect_same_state(*optimizer, *peer);
          }
          test::set_gradients(parameters, step);
          test::set_gradients(straight, step);
          optimizer->step_unless({.on_device = later.on_device.sub(1)});
          peer->step();
        }
        for (std::size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(at::equal(parameters[i], straight[i])) << i;
        expect_same_state(*optimizer, *peer);
      }
    }
  }
}

}  // namespace
}  // namespace cohort::optim
