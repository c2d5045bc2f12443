#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>

#include "cohort/models/lenet.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/autocast.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/schedule.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"
#include "nets.h"

// Whole trainings, eager and scripted, with everything that a training loop does: the bits of every loss, of
// parameters, gradients, buffers, of the averaged weights and of the generator are the same.
namespace cohort::script {
namespace {

using test::cross_entropy;
using test::same_bits;
using Batches = std::vector<std::pair<at::Tensor, at::Tensor>>;

enum class Mode : std::uint8_t { kEager, kStep, kFunction };

struct Training {
  int steps = 100;
  bool adam = false;
  bool bf16 = false;
};

constexpr double kMaxNorm = 1.0;

std::unique_ptr<optim::Optimizer> make_optimizer(Tensors parameters, bool adam) {
  if (adam) return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions(2e-3));
  return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}

// Weights averaged over steps, by operators of the user's own.
class Average {
 public:
  explicit Average(Tensors parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& tensor : parameters_) average_.push_back(tensor.detach().clone());
  }
  void update() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < average_.size(); ++i) average_[i].mul_(0.95).add_(parameters_[i], 0.05);
  }
  const Tensors& average() const { return average_; }

 private:
  Tensors parameters_, average_;
};

struct Result {
  Tensors losses, state;
  std::string explained;
};

template <typename Make>
Result train(const Make& make, const Batches& batches, const Training& training, Mode mode) {
  at::manual_seed(1);
  auto model = make();
  const auto optimizer = make_optimizer(model->parameters(), training.adam);
  const auto schedule = optim::warmup(5, 0.1, optim::cosine(training.steps));
  Average average(model->parameters());
  const auto before_update = [&] { optim::clip_grad_norm_(model->parameters(), kMaxNorm); };
  auto step = script_step(model, cross_entropy, *optimizer, ScriptOptions(), before_update);
  auto fast = script(model);
  Result result;
  at::manual_seed(7);
  for (int i = 0; i < training.steps; ++i) {
    schedule->apply(*optimizer, i);
    const auto& [x, y] = batches[static_cast<std::size_t>(i) % batches.size()];
    std::optional<optim::Autocast> narrow;
    if (training.bf16) narrow.emplace(at::kCPU, at::kBFloat16);
    if (mode == Mode::kStep) {
      result.losses.push_back(step(x, y));
    } else {
      optimizer->zero_grad();
      const at::Tensor loss = cross_entropy(mode == Mode::kFunction ? fast(x) : model->forward(x), y);
      loss.backward();
      before_update();
      optimizer->step();
      result.losses.push_back(loss.detach());
    }
    average.update();
  }
  for (const at::Tensor& tensor : model->parameters()) {
    result.state.push_back(tensor.detach());
    result.state.push_back(tensor.grad());
  }
  for (const at::Tensor& tensor : model->buffers()) result.state.push_back(tensor);
  for (const at::Tensor& tensor : average.average()) result.state.push_back(tensor);
  result.state.push_back(at::rand({3}));  // where the generator stands
  result.explained = mode == Mode::kStep ? step.explain() : fast.explain();
  return result;
}

template <typename Make>
void expect_same(const Make& make, const Batches& batches, const Training& training) {
  const Result eager = train(make, batches, training, Mode::kEager);
  for (const Mode mode : {Mode::kStep, Mode::kFunction}) {
    SCOPED_TRACE(mode == Mode::kStep ? "script_step" : "script(model)");
    const Result scripted = train(make, batches, training, mode);
    EXPECT_NE(scripted.explained.find("program: "), std::string::npos) << scripted.explained;
    EXPECT_EQ(scripted.explained.find("eager: "), std::string::npos) << scripted.explained;
    EXPECT_TRUE(same_bits(eager.losses, scripted.losses)) << scripted.explained;
    EXPECT_TRUE(same_bits(eager.state, scripted.state)) << scripted.explained;
  }
}

Batches batches_of(at::IntArrayRef size, std::int64_t targets) {
  at::manual_seed(3);
  Batches batches;
  for (int i = 0; i < 4; ++i) batches.emplace_back(at::randn(size), at::randint(0, 10, {targets}));
  return batches;
}

models::ModelOptions options_of(const char* name, std::int64_t channels, std::int64_t size, double width) {
  models::ModelOptions options;
  options.name = name;
  options.num_classes = 10;
  options.in_channels = channels;
  options.image_size = size;
  options.width = width;
  return options;
}

TEST(ScriptModelsTest, MlpWithBatchNormAndDropout) {
  const auto make = [] { return test::small_mlp(); };
  expect_same(make, batches_of({16, 32}, 16), {});
  expect_same(make, batches_of({16, 32}, 16), {.adam = true});
}

TEST(ScriptModelsTest, LeNet) {
  expect_same([] { return models::LeNet5(options_of("lenet5", 1, 28, 1)); }, batches_of({4, 1, 28, 28}, 4),
              {});
}

TEST(ScriptModelsTest, Vgg11OfAnEighthOfItsWidth) {
  expect_same([] { return models::VGG(options_of("vgg11", 3, 32, 0.125)); }, batches_of({2, 3, 32, 32}, 2),
              {.steps = 100});
}

TEST(ScriptModelsTest, ResNet18OfAnEighthOfItsWidth) {
  expect_same([] { return models::ResNet(options_of("resnet18", 3, 32, 0.125)); },
              batches_of({2, 3, 32, 32}, 2), {.steps = 100});
}

TEST(ScriptModelsTest, Lstm) {
  at::manual_seed(3);
  Batches batches;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tokens = at::randint(0, 50, {4, 12});
    batches.emplace_back(tokens, tokens.view(-1));
  }
  expect_same([] { return test::Tagger(); }, batches, {.adam = true});
}

TEST(ScriptModelsTest, TransformerLayerWithAttentionAndDropout) {
  expect_same([] { return test::Encoder(); }, batches_of({6, 4, 32}, 24), {.adam = true});
}

TEST(ScriptModelsTest, InBf16) {
  expect_same([] { return test::small_mlp(); }, batches_of({16, 32}, 16), {.bf16 = true});
  expect_same([] { return test::Encoder(); }, batches_of({6, 4, 32}, 24), {.adam = true, .bf16 = true});
  expect_same([] { return models::LeNet5(options_of("lenet5", 1, 28, 1)); }, batches_of({4, 1, 28, 28}, 4),
              {.steps = 30, .bf16 = true});
}

}  // namespace
}  // namespace cohort::script
