#include "cohort/models/observer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <limits>
#include <set>
#include <stdexcept>
#include <thread>

#include "cohort/models/registry.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

std::vector<std::string> observed_names(torch::nn::AnyModule& model, const at::Tensor& images) {
  std::vector<std::string> names;
  const LayerObserver observer(*model.ptr(), [&](const std::string& name, const torch::nn::Module& layer,
                                                 const at::Tensor& input, const at::Tensor& output) {
    EXPECT_TRUE(layer.children().empty()) << name;
    EXPECT_TRUE(input.defined() && output.defined());
    names.push_back(name);
  });
  model.forward(images);
  return names;
}

TEST(LayerObserverTest, SeesEveryLeafLayerInItsOrder) {
  ModelOptions options;
  options.name = "lenet5";
  options.in_channels = 1;
  options.image_size = 28;
  torch::nn::AnyModule lenet = make_model(options);
  const std::vector<std::string> expected{"conv1", "relu", "pool", "conv2", "relu", "pool",
                                          "fc1",   "relu", "fc2",  "relu",  "fc3"};
  EXPECT_EQ(observed_names(lenet, at::rand({1, 1, 28, 28})), expected);
}

class ObservedModelTest : public testing::TestWithParam<const char*> {};

TEST_P(ObservedModelTest, EveryLeafIsSeenAndTheResultIsTheSame) {
  ModelOptions options;
  options.name = GetParam();
  options.image_size = 32;
  options.width = options.name == "mlp" ? 1 : 0.0625;
  torch::nn::AnyModule model = make_model(options);
  model.ptr()->eval();
  const at::Tensor images = at::rand({1, 3, 32, 32});
  const std::vector<std::string> names = observed_names(model, images);
  const std::set<std::string> seen(names.begin(), names.end());
  for (const auto& part : model.ptr()->named_modules("", false)) {
    if (part.value()->children().empty()) {
      EXPECT_TRUE(seen.contains(part.key())) << part.key();
    }
  }
  const at::Tensor plain = model.forward(images);
  const LayerObserver observer(*model.ptr(), [](const auto&, const auto&, const auto&, const auto&) {});
  EXPECT_TRUE(at::equal(model.forward(images), plain));
}

INSTANTIATE_TEST_SUITE_P(Models, ObservedModelTest,
                         testing::Values("vgg16_bn", "resnet18", "resnet50", "mlp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(LayerObserverTest, NestsAndIsOfItsThread) {
  EXPECT_EQ(LayerObserver::current(), nullptr);
  torch::nn::AnyModule model = make_model(quick_options());
  const LayerObserver::Callback nothing = [](const auto&, const auto&, const auto&, const auto&) {};
  {
    const LayerObserver outer(*model.ptr(), nothing);
    {
      const LayerObserver inner(*model.ptr(), nothing);
      EXPECT_EQ(LayerObserver::current(), &inner);
    }
    EXPECT_EQ(LayerObserver::current(), &outer);
    std::thread([] { EXPECT_EQ(LayerObserver::current(), nullptr); }).join();
  }
  EXPECT_EQ(LayerObserver::current(), nullptr);
}

TEST(LayerObserverTest, AnExceptionOfTheCallbackLeavesThroughForward) {
  torch::nn::AnyModule model = make_model(quick_options());
  const LayerObserver observer(*model.ptr(), [](const auto&, const auto&, const auto&, const auto&) {
    throw std::runtime_error("stop here");
  });
  EXPECT_THROW(model.forward(at::rand({1, 1, 28, 28})), std::runtime_error);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(FirstNonFiniteTest, NamesTheLayerAndLeavesTheModelAlone) {
  torch::nn::AnyModule model = make_model(quick_options());
  const auto module = model.ptr();
  const at::Tensor images = golden_images(1, 28);
  EXPECT_EQ(first_non_finite(model, images), std::nullopt);
  {
    const at::NoGradGuard no_grad;
    module->named_parameters()["features.5.weight"].flatten()[3].fill_(kInfinity);
  }
  const at::Tensor mean = module->named_buffers()["features.1.running_mean"].clone();
  const at::Tensor count = module->named_buffers()["features.1.num_batches_tracked"].clone();
  EXPECT_EQ(first_non_finite(model, images), "features.5");
  EXPECT_TRUE(at::equal(module->named_buffers()["features.1.running_mean"], mean));
  EXPECT_TRUE(at::equal(module->named_buffers()["features.1.num_batches_tracked"], count));
  EXPECT_TRUE(module->is_training());
}

TEST(FirstNonFiniteTest, NamesTheInputWhenThatIsNotFinite) {
  torch::nn::AnyModule model = make_model(quick_options());
  at::Tensor images = golden_images(1, 28);
  images[1][0][3][4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(first_non_finite(model, images), "input");
}

TEST(FirstNonFiniteTest, DrawsNoRandomNumber) {
  ModelOptions options;
  options.name = "vgg11";
  options.image_size = 32;
  options.width = 0.0625;
  torch::nn::AnyModule model = make_model(options);  // has dropout
  torch::manual_seed(5);
  const at::Tensor expected = at::rand({4});
  torch::manual_seed(5);
  EXPECT_EQ(first_non_finite(model, at::ones({1, 3, 32, 32})), std::nullopt);
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(FirstNonFiniteTest, SaysOutputForAModelThatReportsNoLayers) {
  torch::nn::Linear linear(2, 2);
  {
    const at::NoGradGuard no_grad;
    linear->weight.fill_(kInfinity);
  }
  torch::nn::AnyModule model(linear);
  EXPECT_EQ(first_non_finite(model, at::ones({1, 2})), "output");
}

}  // namespace
}  // namespace cohort::models
