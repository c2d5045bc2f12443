// Whole trainings of the models that scripts must hold for: nets.h and Cohort's own.
#include "cohort/models/lenet.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"
#include "trainings.h"

namespace cohort::script {
namespace {

using namespace trainings;

TEST(ScriptModelsTest, MlpWithBatchNormAndDropout) {
  const auto make = [] { return cohort::test::small_mlp(); };
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
  expect_same([] { return cohort::test::Tagger(); }, batches, {.adam = true});
}

TEST(ScriptModelsTest, TransformerLayerWithAttentionAndDropout) {
  expect_same([] { return cohort::test::Encoder(); }, batches_of({6, 4, 32}, 24), {.adam = true});
}

TEST(ScriptModelsTest, InBf16) {
  expect_same([] { return cohort::test::small_mlp(); }, batches_of({16, 32}, 16), {.bf16 = true});
  expect_same([] { return cohort::test::Encoder(); }, batches_of({6, 4, 32}, 24),
              {.adam = true, .bf16 = true});
  expect_same([] { return models::LeNet5(options_of("lenet5", 1, 28, 1)); }, batches_of({4, 1, 28, 28}, 4),
              {.steps = 30, .bf16 = true});
}

}  // namespace
}  // namespace cohort::script
