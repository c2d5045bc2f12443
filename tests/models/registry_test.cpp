#include "cohort/models/registry.h"

#include <ATen/ops/rand.h>
#include <dlfcn.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>

#include "cohort/models/resnet.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

std::string rejection(const std::string& name) {
  ModelOptions options;
  options.name = name;
  return message_of<UsageError>([&] { make_model(options); });
}

torch::nn::AnyModule make_linear(const ModelOptions& options) {
  return torch::nn::AnyModule(torch::nn::Linear(options.in_channels, options.num_classes));
}

TEST(RegistryTest, KnowsOurs) {
  const std::vector<std::string> names = model_names();
  for (const char* name : {"vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn",
                           "resnet18", "resnet34", "resnet50", "lenet5", "mlp"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(RegistryTest, AnUnknownNameListsTheNearestAndAll) {
  const std::string message = rejection("vgg16bn");
  EXPECT_PRED2(contains, message, "there is no model 'vgg16bn'");
  EXPECT_PRED2(contains, message, "Try: vgg16_bn; the models are ");
  EXPECT_PRED2(contains, message, "lenet5, mlp, resnet18, resnet34, resnet50, ");
  EXPECT_PRED2(contains, message, "--load");
}

TEST(RegistryTest, AResNetThatDoesNotExistListsThoseThatDo) {
  const auto make = [] { static_cast<void>(ResNet(ModelOptions{.name = "resnet19", .extra = {}})); };
  EXPECT_PRED2(
      contains, message_of<UsageError>(make),
      "[models.resnet] name of a ResNet: got 'resnet19', expected one of resnet18, resnet34, resnet50");
}

TEST(RegistryTest, TakesAUsersModelOnce) {
  register_model("my_linear", make_linear);
  ModelOptions options;
  options.name = "my_linear";
  options.num_classes = 4;
  torch::nn::AnyModule model = make_model(options);
  EXPECT_EQ(model.forward(at::rand({2, 3})).sizes(), at::IntArrayRef({2, 4}));
  EXPECT_PRED2(contains, message_of<UsageError>([] { register_model("my_linear", make_linear); }),
               "'my_linear' is registered already, by register_model");
  EXPECT_PRED2(contains, message_of<UsageError>([] { register_model("vgg16", make_linear); }), "by Cohort");
  EXPECT_PRED2(contains, message_of<UsageError>([] { register_model("", make_linear); }),
               "the name of the model is empty");
}

TEST(RegistryTest, OptionsThatAUsersModelDoesNotReadAreRejected) {
  register_model("picky", [](const ModelOptions& options) {
    if (options.extra.flag("fail", false)) throw std::runtime_error("stoll");
    return torch::nn::AnyModule(torch::nn::Linear(options.extra.integer("width", 8, 1), 2));
  });
  ModelOptions options{.name = "picky", .extra = {{"width", "3"}}};
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(make_model(options).forward(at::rand({5, 3})).sizes(), at::IntArrayRef({5, 2}));
  }
  options.extra = {{"widht", "3"}};
  EXPECT_PRED2(contains, message_of<ConfigError>([&] { make_model(options); }),
               "[models.options] model 'picky' has no option widht. Try: width; its options are fail, width");
  options.extra = {{"width", "0"}};
  EXPECT_PRED2(
      contains, message_of<ConfigError>([&] { make_model(options); }),
      "while making model 'picky': [models.options] model 'picky': option width is '0', expected at least 1");
  options.extra = {{"fail", "on"}};
  EXPECT_PRED2(contains, message_of<UsageError>([&] { make_model(options); }),
               "[models.registry] while making model 'picky': stoll");
}

TEST(RegistryTest, TakesModelsOfASharedLibrary) {
  ASSERT_NE(dlopen(COHORT_TEST_PLUGIN_FIRST, RTLD_NOW), nullptr) << dlerror();
  ModelOptions options;
  options.name = "plugin_model";
  options.num_classes = 6;
  torch::nn::AnyModule model = make_model(options);
  EXPECT_EQ(model.forward(at::rand({2, 3})).sizes(), at::IntArrayRef({2, 6}));

  // A second library with the same name: loading succeeds, using the name says who registered it.
  ASSERT_NE(dlopen(COHORT_TEST_PLUGIN_SECOND, RTLD_NOW), nullptr) << dlerror();
  const std::string message = rejection("plugin_model");
  EXPECT_PRED2(contains, message, "registered twice");
  EXPECT_PRED2(contains, message, "plugin_first.cpp:");
  EXPECT_PRED2(contains, message, "plugin_second.cpp:");
  options.name = "other_plugin_model";
  EXPECT_NO_THROW(make_model(options));
}

}  // namespace
}  // namespace cohort::models
