// A model trained here and loaded by PyTorch: torchvision's model of the same name must give the same logits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "cohort/checkpoint/state_dict.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"
#include "tests/support/processes/python.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::checkpoint {
namespace {

constexpr int64_t kClasses = 10;

/// Five steps of SGD on small random batches, each of which changes every parameter and buffer. Then the
/// state, an input and its logits are saved for PyTorch.
template <typename Model>
void train_and_compare(const std::string& name) {
  test::TempDir dir;
  at::manual_seed(1);
  models::ModelOptions options;
  options.name = name;
  options.num_classes = kClasses;
  options.image_size = 64;
  Model model(options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(at::randn({4, 3, 64, 64}));
    at::cross_entropy_loss(logits, at::randint(kClasses, {4}, at::kLong)).backward();
    optimizer.step();
  }
  model->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor input = at::randn({2, 3, 64, 64});
  const at::Tensor logits = model->forward(input);
  ASSERT_TRUE(logits.isfinite().all().template item<bool>());
  save_safetensors(dir / "model.safetensors", module_state(*model));
  save_safetensors(dir / "io.safetensors", {{"input", input}, {"logits", logits}});
  const auto script = test::source_dir() / "tests/checkpoint/read_with_pytorch.py";
  EXPECT_EQ(test::run_python({script, "logits", dir / "model.safetensors", name, dir / "io.safetensors"}), 0);
}

TEST(TrainForPyTorchTest, ResNet50GivesTheSameLogitsInTorchvision) {
  COHORT_NEED_PYTHON();
  train_and_compare<models::ResNet>("resnet50");
}

TEST(TrainForPyTorchTest, Vgg16WithBatchNormGivesTheSameLogitsInTorchvision) {
  COHORT_NEED_PYTHON();
  train_and_compare<models::VGG>("vgg16_bn");
}

}  // namespace
}  // namespace cohort::checkpoint
