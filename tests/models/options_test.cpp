#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>

#include <cmath>
#include <functional>

#include "cohort/models/registry.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

std::string rejection(const std::string& name, const std::function<void(ModelOptions&)>& change) {
  ModelOptions options;
  options.name = name;
  change(options);
  return message_of<UsageError>([&] { make_model(options); });
}

TEST(OptionsTest, AnImageThatIsTooSmallIsRejectedNamingTheSmallest) {
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.image_size = 31; }), "the smallest is 32 x 32");
  EXPECT_PRED2(contains,
               rejection("vgg11_bn",
                         [](auto& o) {
                           o.image_size = 15;
                           o.pools = 4;
                         }),
               "vgg11_bn does not fit images of 15 x 15 pixels, the smallest is 16 x 16");
  EXPECT_PRED2(contains, rejection("lenet5", [](auto& o) { o.image_size = 11; }), "the smallest is 12 x 12");
}

TEST(OptionsTest, ValuesOutOfRangeAreRejected) {
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.num_classes = 0; }),
               "num_classes is 0, expected at least 1");
  EXPECT_PRED2(contains, rejection("mlp", [](auto& o) { o.in_channels = -1; }), "in_channels is -1");
  EXPECT_PRED2(contains, rejection("resnet18", [](auto& o) { o.image_size = 0; }), "image_size is 0");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.width = 0; }), "width is 0, expected above 0");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.dropout = 1.5; }),
               "dropout is 1.5, expected at least 0 and at most 1");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.dropout = NAN; }), "dropout is nan, expected");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.pools = 6; }), "pools is 6, expected 0 to 5");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.head = "big"; }),
               "head is big, expected default or linear");
  EXPECT_PRED2(contains, rejection("mlp", [](auto& o) { o.extra["hidden"] = "5,x"; }), "hidden is 5,x");
  EXPECT_PRED2(contains, rejection("mlp", [](auto& o) { o.extra["hidden"] = "0"; }), "sizes of at least 1");
}

// As torch::nn::Dropout takes it: each value is dropped.
TEST(OptionsTest, DropoutMayBeOne) {
  ModelOptions options;
  options.name = "vgg11";
  options.width = 0.05;
  options.image_size = 32;
  options.num_classes = 3;
  options.dropout = 1;
  torch::nn::AnyModule model = make_model(options);
  const at::Tensor images = at::rand({2, 3, 32, 32});
  // What is left of the head is the bias of its last layer.
  const at::Tensor scores = model.forward(images);
  EXPECT_TRUE(at::equal(scores[0], scores[1]));
  model.ptr()->eval();
  EXPECT_FALSE(at::equal(model.forward(images)[0], scores[0]));
}

TEST(OptionsTest, AnOptionThatTheModelDoesNotHaveIsRejected) {
  EXPECT_PRED2(contains, rejection("resnet18", [](auto& o) { o.pools = 4; }),
               "resnet18 has no option `pools`");
  EXPECT_PRED2(contains, rejection("resnet50", [](auto& o) { o.head = "linear"; }), "no option `head`");
  EXPECT_PRED2(contains, rejection("lenet5", [](auto& o) { o.width = 2; }), "no option `width`: got 2");
  EXPECT_PRED2(contains, rejection("mlp", [](auto& o) { o.dropout = 0.1; }), "no option `dropout`");
  EXPECT_PRED2(contains, rejection("mlp", [](auto& o) { o.extra["hiden"] = "5"; }), "did you mean `hidden`");
  EXPECT_PRED2(contains, rejection("vgg16", [](auto& o) { o.extra["depth"] = "5"; }), "no option `depth`");
  EXPECT_PRED2(contains,
               rejection("vgg16",
                         [](auto& o) {
                           o.head = "linear";
                           o.dropout = 0.2;
                         }),
               "no option `dropout`");
}

TEST(OptionsTest, AnInputThatDoesNotFitIsRejected) {
  torch::nn::AnyModule quick = make_model(quick_options());
  const auto rejected = [](torch::nn::AnyModule& model, const at::Tensor& input) {
    return message_of<UsageError>([&] { model.forward(input); });
  };
  EXPECT_PRED2(contains, rejected(quick, at::rand({2, 3, 28, 28})), "expected [batch, 1, height, width]");
  EXPECT_PRED2(contains, rejected(quick, at::rand({2, 1, 28, 15})), "the smallest is 16 x 16");
  EXPECT_PRED2(contains, rejected(quick, at::rand({1, 28, 28})), "shape [1, 28, 28]");
  ModelOptions options;
  options.in_channels = 1;
  options.image_size = 28;
  options.name = "lenet5";
  torch::nn::AnyModule lenet = make_model(options);
  EXPECT_PRED2(contains, rejected(lenet, at::rand({2, 1, 32, 32})),
               "built for images of 28 x 28 pixels: got 32 x 32");
  options.name = "mlp";
  torch::nn::AnyModule mlp = make_model(options);
  EXPECT_PRED2(contains, rejected(mlp, at::rand({2, 783})),
               "built for 1 x 28 x 28 values: got an input of shape [2, 783]");
}

}  // namespace
}  // namespace cohort::models
