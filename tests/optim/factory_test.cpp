#include "cohort/optim/factory.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <string>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "tests/optim/support.h"
#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

std::vector<ParamGroup> groups() {
  return {{.params = test::fresh_parameters()}};
}

TEST(FactoryTest, MakesOptimizersByNameWithTheirOptions) {
  for (const std::string name : {"sgd", "adam", "adamw"}) {
    const auto optimizer = make_optimizer({.name = name, .lr = 0.25, .weight_decay = 0.125}, groups());
    EXPECT_EQ(optimizer->type(), name);
    EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].lr, 0.25);
    EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].weight_decay, 0.125);
  }
  const auto sgd =
      make_optimizer({.momentum = 0.5, .dampening = 0.0, .nesterov = true, .maximize = true}, groups());
  EXPECT_DOUBLE_EQ(sgd->param_groups()[0].momentum, 0.5);
  EXPECT_TRUE(*sgd->param_groups()[0].nesterov);
  EXPECT_TRUE(*sgd->param_groups()[0].maximize);
  const auto adam =
      make_optimizer({.name = "adam", .beta1 = 0.5, .beta2 = 0.75, .eps = 0.1, .amsgrad = true}, groups());
  EXPECT_DOUBLE_EQ(adam->param_groups()[0].beta1, 0.5);
  EXPECT_DOUBLE_EQ(adam->param_groups()[0].beta2, 0.75);
  EXPECT_DOUBLE_EQ(adam->param_groups()[0].eps, 0.1);
  EXPECT_TRUE(*adam->param_groups()[0].amsgrad);
  EXPECT_DOUBLE_EQ(make_optimizer({.name = "adamw"}, groups())->param_groups()[0].weight_decay, 1e-2);
}

TEST(FactoryTest, RejectsUnknownNamesAndForeignOptions) {
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "adamv"}, groups()), UsageError,
                           "there is no optimizer 'adamv'. Try: adam; the optimizers are adam, adamw, sgd");
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "sgd", .extra = {{"rho", "0.9"}}}, groups()), ConfigError,
                           "rho");
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "sgd", .beta1 = 0.9}, groups()), ConfigError,
                           "sgd has none of");
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "adam", .momentum = 0.9}, groups()), ConfigError,
                           "adam has none of the options momentum");
}

// Adam's steps are counted in one number beside the tensors, which the figure leaves out.
TEST(FactoryTest, StateBytesAreThoseOfTheTensorsThatAStepKeeps) {
  const at::Tensor parameter = test::fresh_parameters()[0];
  const auto bytes = [&](const OptimizerOptions& options) {
    const auto optimizer = make_optimizer(options, groups());
    for (ParamGroup& group : optimizer->param_groups()) {
      for (at::Tensor& each : group.params) each.mutable_grad() = at::ones_like(each);
    }
    optimizer->step();
    std::int64_t kept = 0;
    for (const auto& [name, tensor] : optimizer->state().tensors) {
      if (name.starts_with("state.0.") && !name.ends_with("step")) {
        kept += static_cast<std::int64_t>(tensor.nbytes());
      }
    }
    EXPECT_EQ(optimizer->state_bytes(optimizer->param_groups()[0], parameter), kept);
    return kept / static_cast<std::int64_t>(parameter.nbytes());
  };
  EXPECT_EQ(bytes({.name = "sgd", .momentum = 0.0}), 0);
  EXPECT_EQ(bytes({.name = "sgd", .momentum = 0.9}), 1);
  EXPECT_EQ(bytes({.name = "adam"}), 2);
  EXPECT_EQ(bytes({.name = "adamw", .amsgrad = true}), 3);
}

// Its groups have no rate: they would all step by NaN.
class Unfilled : public Optimizer {
 public:
  explicit Unfilled(std::vector<ParamGroup> groups) : Optimizer(std::move(groups)) {}
  std::string type() const override { return "unfilled"; }
  void step() override {}
};

COHORT_REGISTER_OPTIMIZER("unfilled", [](const OptimizerOptions&, std::vector<ParamGroup> groups) {
  return std::make_unique<Unfilled>(std::move(groups));
});

class ScaledSignSGD : public Optimizer {
 public:
  ScaledSignSGD(std::vector<ParamGroup> groups, double lr, double scale)
      : Optimizer(std::move(groups)), scale_(scale) {
    fill_options({.lr = lr});
  }
  std::string type() const override { return "sign_sgd"; }
  void step() override {
    const at::NoGradGuard no_grad;
    for (ParamGroup& group : param_groups()) {
      for (at::Tensor& parameter : group.params) parameter.add_(parameter.grad().sign(), -scale_ * group.lr);
    }
  }

 private:
  double scale_;
};

COHORT_REGISTER_OPTIMIZER("sign_sgd", [](const OptimizerOptions& options, std::vector<ParamGroup> groups) {
  return std::make_unique<ScaledSignSGD>(std::move(groups), options.lr.value_or(0.01),
                                         options.extra.number("scale", 1));
});

TEST(FactoryTest, ARegisteredOptimizerIsMadeByNameWithItsOptions) {
  const auto optimizer = make_optimizer({.name = "sign_sgd", .extra = {{"scale", "3"}}}, groups());
  EXPECT_EQ(optimizer->type(), "sign_sgd");
  EXPECT_EQ(optimizer->state_bytes(optimizer->param_groups()[0], test::fresh_parameters()[0]), 0);
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "sign_sgd", .extra = {{"scal", "3"}}}, groups()),
                           ConfigError, "scal");
  EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].lr, 0.01);
  COHORT_EXPECT_THROW_WITH(make_optimizer({.name = "unfilled", .lr = 0.1}, groups()), UsageError,
                           "optimizer 'unfilled' leaves lr of a group open");
  COHORT_EXPECT_THROW_WITH(register_optimizer("adam", [](const auto&, auto) { return nullptr; }), UsageError,
                           "'adam' is registered already, by Cohort");
}

TEST(FactoryTest, ADecayThatARegisteredOptimizerDoesNotNameIsAWarningAndOfAGroupAnError) {
  std::string warnings;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { warnings += std::string(line) + "\n"; });
  make_optimizer({.name = "sign_sgd", .weight_decay = 0.0}, groups());
  make_optimizer({.name = "adamw", .weight_decay = 0.5}, groups());
  EXPECT_EQ(warnings, "");
  for (int i = 0; i < 2; ++i) make_optimizer({.name = "sign_sgd", .weight_decay = 0.5}, groups());
  base::set_log_sink({});
  const std::string words =
      "optimizer 'sign_sgd' may not use weight_decay 0.5: its group_options() do not name it";
  EXPECT_NE(warnings.find(words), std::string::npos) << warnings;
  EXPECT_EQ(warnings.find(words), warnings.rfind(words)) << "the second is silent";

  std::vector<ParamGroup> decayed = groups();
  decayed[0].name = "decay";
  decayed[0].weight_decay = 0.5;
  COHORT_EXPECT_THROW_WITH(
      make_optimizer({.name = "sign_sgd"}, decayed), UsageError,
      "group \"decay\" sets weight_decay, which sign_sgd does not have. Try: in an optimizer "
      "of your own, name it in group_options(), and give it a value in fill_options()");
}

TEST(FactoryTest, BiasesAndNormsAreNotDecayed) {
  torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
  const std::vector<ParamGroup> split = split_decay(named_parameters(*model), 0.5);
  ASSERT_EQ(split.size(), 2u);
  EXPECT_EQ(split[0].name, "decay");
  ASSERT_EQ(split[0].params.size(), 1u);
  EXPECT_EQ(split[0].params[0].dim(), 4);
  EXPECT_DOUBLE_EQ(split[0].weight_decay, 0.5);
  EXPECT_EQ(split[1].name, "no_decay");
  EXPECT_EQ(split[1].params.size(), 3u);
  EXPECT_DOUBLE_EQ(split[1].weight_decay, 0.0);
  EXPECT_EQ(split_decay({{"weight", at::ones({2, 2})}}, 0.5).size(), 1u);
}

}  // namespace
}  // namespace cohort::optim
