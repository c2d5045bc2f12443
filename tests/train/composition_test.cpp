// docs/reference/composition.md: features in pairs, each stopped in the middle of an epoch, resumed, and
// compared bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/data/synthetic.h"
#include "cohort/optim/factory.h"
#include "cohort/train/classification.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/train/small_vgg.h"

namespace cohort::train {
namespace {

enum Feature { kAccumulate, kBf16, kClip, kSmoothing, kSkipNonFinite, kNumFeatures };
const char* const kNames[] = {"Accumulation", "Bf16", "Clipping", "LabelSmoothing", "SkipNonFinite"};

/// A VGG on made-up images; the loss of step 5 is not finite when such steps are skipped.
struct PoisonedTask : ClassificationTask {
  PoisonedTask(torch::nn::AnyModule model, std::shared_ptr<optim::Optimizer> optimizer,
               ClassificationOptions options, bool poisoned)
      : ClassificationTask(model, optimizer, optim::cosine(12), options), poisoned(poisoned) {}
  StepMetrics train_step(data::Batch& batch) override {
    if (poisoned && batch.epoch == 1 && batch.number == 0)
      batch.input().fill_(std::numeric_limits<float>::infinity());
    return ClassificationTask::train_step(batch);
  }
  bool poisoned;
};

std::vector<at::Tensor> train(Feature a, Feature b, const std::filesystem::path& folder,
                              std::int64_t stop_after, const std::string& optimizer_name) {
  const auto has = [&](Feature f) { return a == f || b == f; };
  torch::nn::AnyModule model = test::small_vgg("vgg11_bn");
  optim::OptimizerOptions options{.name = optimizer_name, .lr = 0.01};
  if (optimizer_name == "sgd") options.momentum = 0.9;
  std::shared_ptr<optim::Optimizer> optimizer =
      optim::make_optimizer(options, {{.params = model.ptr()->parameters()}});
  PoisonedTask task(model, optimizer,
                    ClassificationOptions()
                        .accumulate(has(kAccumulate) ? 3 : 1)
                        .bf16(has(kBf16))
                        .clip_norm(has(kClip) ? 0.5 : 0)
                        .label_smoothing(has(kSmoothing) ? 0.1 : 0),
                    has(kSkipNonFinite));
  data::Loader loader(std::make_shared<data::SyntheticDataset>(
                          data::SyntheticOptions{.size = 28, .shape = {1, 16, 16}, .num_classes = 4}),
                      {.batch_size = 8, .shuffle = true, .seed = 2});
  TrainerOptions trainer_options;
  trainer_options.epochs(3).seed(9).max_steps(stop_after).stop_on_non_finite(!has(kSkipNonFinite));
  if (!folder.empty()) trainer_options.run_dir(folder).resume("auto");
  Trainer(trainer_options).fit(task, loader);
  return model.ptr()->parameters();
}

class CompositionTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(CompositionTest, ResumesBitForBit) {
  const auto [first, second] = GetParam();
  const auto a = static_cast<Feature>(first), b = static_cast<Feature>(second);
  if (first > second) return;  // the other order is the same pair
  for (const char* optimizer : {"sgd", "adamw"}) {
    const std::vector<at::Tensor> straight = train(a, b, {}, 0, optimizer);
    test::TempDir folder;
    train(a, b, folder.path(), 6, optimizer);
    const std::vector<at::Tensor> resumed = train(a, b, folder.path(), 0, optimizer);
    ASSERT_EQ(straight.size(), resumed.size());
    for (std::size_t i = 0; i < straight.size(); ++i) {
      EXPECT_TRUE(at::isfinite(straight[i]).all().item<bool>());
      EXPECT_TRUE(at::equal(straight[i], resumed[i])) << optimizer << ", parameter " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryPair, CompositionTest,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(kNumFeatures)),
                                            ::testing::Range(0, static_cast<int>(kNumFeatures))),
                         [](const auto& info) {
                           return std::string(kNames[std::get<0>(info.param)]) +
                                  kNames[std::get<1>(info.param)];
                         });

/// A feature that is silently off would leave the numbers as they are.
TEST(CompositionFeatures, EachChangesTheNumbers) {
  const std::vector<at::Tensor> plain = train(kNumFeatures, kNumFeatures, {}, 0, "sgd");
  for (int feature = 0; feature < kNumFeatures; ++feature) {
    const std::vector<at::Tensor> other = train(static_cast<Feature>(feature), kNumFeatures, {}, 0, "sgd");
    EXPECT_FALSE(at::equal(plain[0], other[0])) << kNames[feature];
  }
}

}  // namespace
}  // namespace cohort::train
