// What a run reads, without a run.
#include "cohort/train/internal/run_data.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

// Two samples, whose classes depend on the split.
class Letters : public data::ExampleDataset {
 public:
  explicit Letters(std::vector<std::string> classes) : classes_(std::move(classes)) {}
  std::int64_t size() const override { return 2; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
    return {at::zeros({2, 3, 3}), at::scalar_tensor(index, at::kLong)};
  }
  std::vector<std::string> classes() const override { return classes_; }

 private:
  std::vector<std::string> classes_;
};

RunData letters(const std::string& in_validation) {
  const auto make = [in_validation](const data::DatasetArgs& args) {
    const bool training = args.at("split") == "train";
    return std::make_shared<const Letters>(std::vector<std::string>{"a", training ? "b" : in_validation});
  };
  const std::string name = "letters_" + in_validation;
  data::register_dataset(name, make);
  const config::DataConfig config{.type = name, .workers = 0};
  return {config,
          {.num_classes = 0, .seed = 7},
          {.plan = batch_plan({.batch_size = 1}, {}, config, 1), .seed = 7}};
}

TEST(RunDataTest, AModelGetsShapeAndClassesOfTheData) {
  RunData data = letters("b");
  data.open_training();
  EXPECT_EQ(data.evaluation(), nullptr);
  data.open_evaluation();
  EXPECT_EQ(data.training().batches_per_epoch(), 2);
  EXPECT_EQ(data.evaluation()->batches_per_epoch(), 2);
  const ModelSetup setup = data.model_setup();
  EXPECT_EQ(setup.input.shape, (std::vector<std::int64_t>{2, 3, 3}));
  EXPECT_EQ(setup.num_classes, 2);
  EXPECT_EQ(setup.seed, 7);
}

TEST(RunDataTest, TrainingAndValidationHaveTheSameClasses) {
  RunData data = letters("c");
  data.open_training();
  COHORT_EXPECT_THROW_WITH(data.open_evaluation(), DataError, "have different classes; in one only:");
}

TEST(RunDataTest, EvaluationAloneTakesTheClassesOfTheModelByName) {
  RunData data = letters("d");
  data.open_evaluation({"d", "c", "a"});
  EXPECT_EQ(data.model_setup().num_classes, 3);
  std::optional<data::Batch> first = data.evaluation()->next();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->target().item<std::int64_t>(), 2) << "class a";
}

}  // namespace
}  // namespace cohort::train
