// Names, initial values and logits against torchvision's, from golden/make_golden.py.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/modules/dropout.h>
#include <torch/utils.h>

#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/models/registry.h"
#include "tests/models/helpers.h"
#include "tests/support/source_dir.h"

namespace cohort::models {
namespace {

constexpr std::int64_t kSeed = 7;

std::ifstream open_golden(const std::string& file) {
  std::ifstream stream(test::source_dir() / "tests/models/golden" / file);
  EXPECT_TRUE(stream.good()) << file;
  return stream;
}

std::string checksum(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().contiguous();
  const auto* words = static_cast<const std::uint32_t*>(flat.const_data_ptr());
  const std::uint64_t count = flat.nbytes() / sizeof(std::uint32_t);
  std::uint64_t total = 0;
  for (std::uint64_t index = 0; index < count; ++index) total += words[index] * (2 * index + 1);
  std::ostringstream text;
  text << std::hex << total;
  return text.str();
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text;
  for (const std::int64_t size : tensor.sizes()) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text.empty() ? "scalar" : text;
}

torch::nn::AnyModule make(const std::string& name, std::int64_t num_classes) {
  torch::manual_seed(kSeed);
  if (name == "quick") return make_model(quick_options(num_classes));
  ModelOptions options;
  options.name = name;
  options.num_classes = num_classes;
  return make_model(options);
}

/// Parameters and buffers in the order of PyTorch's state_dict: of each module its parameters, then its
/// buffers, then its children.
void append_state(const torch::nn::Module& module, const std::string& prefix,
                  std::vector<std::pair<std::string, at::Tensor>>& state) {
  for (const auto& item : module.named_parameters(false))
    state.emplace_back(prefix + item.key(), item.value());
  for (const auto& item : module.named_buffers(false)) state.emplace_back(prefix + item.key(), item.value());
  for (const auto& child : module.named_children()) {
    append_state(*child.value(), prefix + child.key() + ".", state);
  }
}

struct GoldenTensor {
  std::string name, shape, sum, sum_10;
};

std::vector<GoldenTensor> golden_tensors(const std::string& model) {
  std::ifstream stream = open_golden("initial.txt");
  std::vector<GoldenTensor> tensors;
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string name, key;
    words >> name >> key;
    if (name != model) continue;
    if (key == "10-classes") {
      for (GoldenTensor& tensor : tensors) {
        words >> tensor.sum_10;
        if (tensor.sum_10 == "=") tensor.sum_10 = tensor.sum;
      }
    } else {
      tensors.push_back({key, "", "", ""});
      words >> tensors.back().shape >> tensors.back().sum;
    }
  }
  return tensors;
}

std::vector<double> golden_values(const std::string& model, const std::string& what) {
  std::ifstream stream = open_golden("logits.txt");
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string name, key;
    words >> name >> key;
    if (name != model || key != what) continue;
    std::vector<double> values;
    for (double value = 0; words >> value;) values.push_back(value);
    return values;
  }
  return {};
}

/// Within `tolerance` of the largest golden value.
void expect_near(const at::Tensor& got, const std::vector<double>& expected, double tolerance) {
  const at::Tensor flat = got.detach().flatten().contiguous();
  ASSERT_EQ(flat.numel(), static_cast<std::int64_t>(expected.size()));
  ASSERT_FALSE(expected.empty());
  double scale = 1;
  for (const double value : expected) scale = std::max(scale, std::abs(value));
  for (std::size_t index = 0; index < expected.size(); ++index) {
    EXPECT_NEAR(flat[static_cast<std::int64_t>(index)].item<double>(), expected[index], tolerance * scale)
        << index;
  }
}

class GoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, SeedGivesTorchvisionsTensorsBitForBit) {
  const std::vector<GoldenTensor> golden = golden_tensors(GetParam());
  ASSERT_FALSE(golden.empty());
  for (const std::int64_t classes : {1000, 10}) {
    const torch::nn::AnyModule model = make(GetParam(), classes);
    std::vector<std::pair<std::string, at::Tensor>> state;
    append_state(*model.ptr(), "", state);
    ASSERT_EQ(state.size(), golden.size());
    for (std::size_t index = 0; index < state.size(); ++index) {
      const auto& [name, tensor] = state[index];
      EXPECT_EQ(name, golden[index].name);
      EXPECT_EQ(checksum(tensor), classes == 10 ? golden[index].sum_10 : golden[index].sum)
          << name << " " << classes;
      if (classes == 1000) {
        EXPECT_EQ(shape_text(tensor), golden[index].shape) << name;
      }
    }
  }
}

TEST_P(GoldenTest, EvaluationLogitsEqualTorchvisions) {
  torch::nn::AnyModule model = make(GetParam(), 10);
  model.ptr()->eval();
  const at::NoGradGuard no_grad;
  const bool quick = std::string(GetParam()) == "quick";
  const at::Tensor logits = model.forward(quick ? golden_images(1, 28) : golden_images(3, 64));
  expect_near(logits, golden_values(GetParam(), "eval"), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         testing::Values("vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn",
                                         "vgg19", "vgg19_bn", "resnet18", "resnet34", "resnet50", "quick"),
                         [](const auto& info) { return std::string(info.param); });

class TrainedGoldenTest : public testing::TestWithParam<const char*> {};

// Learning rate and tolerance: see LEARNING_RATE in make_golden.py.
TEST_P(TrainedGoldenTest, ThreeStepsOfSgdEqualThoseOfPyTorch) {
  torch::nn::AnyModule model = make(GetParam(), 10);
  const auto module = model.ptr();
  module->train();
  for (const auto& part : module->modules()) {
    if (auto* dropout = part->as<torch::nn::DropoutImpl>()) dropout->options.p(0.0);
  }
  const at::Tensor images = std::string(GetParam()) == "quick" ? golden_images(1, 28) : golden_images(3, 64);
  const at::Tensor targets = at::arange(2, at::kLong);
  const std::vector<double> losses = golden_values(GetParam(), "losses");
  ASSERT_EQ(losses.size(), 3U);
  for (const double expected : losses) {
    const at::Tensor loss = at::cross_entropy_loss(model.forward(images), targets);
    EXPECT_NEAR(loss.item<double>(), expected, 2e-3 * std::max(1.0, expected));
    module->zero_grad();
    loss.backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : module->parameters()) parameter.sub_(parameter.grad(), 1e-4);
  }
  module->eval();
  const at::NoGradGuard no_grad;
  expect_near(model.forward(images), golden_values(GetParam(), "trained"), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Models, TrainedGoldenTest, testing::Values("vgg11_bn", "resnet18", "quick"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace cohort::models
