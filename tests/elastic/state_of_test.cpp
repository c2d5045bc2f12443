#include "cohort/elastic/state_of.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

struct SmallTraining {
  std::shared_ptr<torch::nn::LinearImpl> net = std::make_shared<torch::nn::LinearImpl>(3, 2);
  std::shared_ptr<optim::SGD> optimizer =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.5));
  optim::ParamGroup& group() { return optimizer->param_groups().front(); }
  StateAccess access() { return state_of(net, optimizer); }
};

// JSON has no NaN and no infinity.
TEST(StateOfTest, ScalarsKeepTheirBits) {
  SmallTraining from, to;
  from.group().lr = 0.1;
  from.group().initial_lr = 5e-324;
  from.group().momentum = -0.0;
  from.group().weight_decay = std::nan("");
  from.group().dampening = std::numeric_limits<double>::infinity();
  to.access().load(from.access().save());
  EXPECT_TRUE(at::equal(to.net->weight, from.net->weight));
  EXPECT_EQ(to.group().lr, 0.1);
  EXPECT_EQ(to.group().initial_lr, 5e-324);
  EXPECT_TRUE(std::signbit(to.group().momentum));
  EXPECT_TRUE(std::isnan(to.group().weight_decay));
  EXPECT_EQ(to.group().dampening, std::numeric_limits<double>::infinity());
}

TEST(StateOfTest, ATextThatCannotBeReadIsAnErrorThatSaysSo) {
  SmallTraining training;
  StateSnapshot state = training.access().save();
  for (const char* const text :
       {"", "7", "[]", "{}", R"({"module":2})", R"({"module":"2","names":[],"scalars":{}})",
        R"({"module":2,"names":[3],"scalars":{}})", R"({"module":2,"names":[],"scalars":{"a":null}})"}) {
    state.text = text;
    COHORT_EXPECT_THROW_WITH(training.access().load(state), DataError, "the text of a state cannot be read");
  }
}

TEST(StateOfTest, AStateOfAnotherModelIsAnError) {
  SmallTraining training;
  StateSnapshot state = training.access().save();
  state.tensors[0] = at::zeros({2, 4});
  COHORT_EXPECT_THROW_WITH(training.access().load(state), DataError, "has the sizes [2, 4], expected [2, 3]");
  state.tensors.pop_back();
  COHORT_EXPECT_THROW_WITH(training.access().load(state), DataError,
                           "a state of 1 tensors came, for a module of 2");
}

}  // namespace
}  // namespace cohort::elastic
